"""Exceptions that stop a run, with their exit codes."""

import errno
import signal

DONE, USAGE, GATE_FAILED, STOPPED_ITSELF, INTERRUPTED = 0, 2, 3, 4, 5


DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a full device, an exceeded quota or a file that is too large."""


SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1") if hasattr(signal, name))
"""Signals that ask a run to save and stop: from a scheduler, Ctrl-C, a closed terminal, SLURM before its time limit."""


class Signalled(BaseException):
    """A signal between steps; its text is the signal's name. Like KeyboardInterrupt it is no Exception, so that code which catches errors
    does not catch it."""


class Stop(Exception):
    """A planned end of the process: `exit_code` and one message, never a traceback."""

    exit_code = STOPPED_ITSELF
    restart = False
    """Whether `--restarts` may start the run again after it."""


class UserError(Stop):
    """Bad usage, setting or data. The message gives the problem, the value, what is needed, the likely cause, the next
    command."""

    exit_code = USAGE

    def __init__(self, what: str, *, got: object = None, needed: object = None, cause: str = "", next: str = ""):
        lines = [what]
        for label, value in (("got", got), ("needed", needed), ("likely cause", cause), ("next", next)):
            if value not in (None, ""):
                lines.append(f"  {label + ':':<14}" + str(value).replace("\n", "\n" + " " * 16))
        super().__init__("\n".join(lines))


def not_permitted(error: PermissionError) -> UserError:
    """Return the message for a file that this user may not read or write: another user's run, a folder that is read-only."""
    return UserError(f"{error.filename or error}: {error.strerror or 'not permitted'}", needed="the right to read and write it",
                     cause="the run belongs to another user, or its folder is read-only")  # fmt: skip


class GateFailed(Stop):
    """At least one gate failed and blocks the run."""

    exit_code = GATE_FAILED


class Interrupted(Stop):
    """A signal. By default the state is saved and `trainworthy resume` continues; otherwise `code` differs."""

    def __init__(self, message: str, *, code: int = INTERRUPTED):
        super().__init__(message)
        self.exit_code = code
