"""What stops a run, and the exit code that says which of the four ways it was."""

import errno
import signal

DONE, USAGE, GATE_FAILED, STOPPED_ITSELF, INTERRUPTED = 0, 2, 3, 4, 5


DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a device, a quota or a file that can take no more."""


SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1") if hasattr(signal, name))
"""What asks a run to save and stop: a scheduler, Ctrl-C, a closed terminal, SLURM before the time is up."""


class TrainworthyWarning(UserWarning):
    """A warning of ours: an error in our own tests."""


class Stop(Exception):
    """A planned end of the process: `exit_code` and one message, never a traceback."""

    exit_code = STOPPED_ITSELF


class UserError(Stop):
    """Bad usage, setting or data: what is wrong, what was got and needed, the likely cause, the next command."""

    exit_code = USAGE

    def __init__(self, what: str, *, got: object = None, needed: object = None, cause: str = "", next: str = ""):
        lines = [what]
        for label, value in (("got", got), ("needed", needed), ("likely cause", cause), ("next", next)):
            if value not in (None, ""):
                lines.append(f"  {label + ':':<14}{value}")
        super().__init__("\n".join(lines))


class GateFailed(Stop):
    """At least one gate gave a blocking verdict."""

    exit_code = GATE_FAILED


class Interrupted(Stop):
    """A signal. By default the state is saved and `trainworthy resume` goes on; where nothing is, `code` says so."""

    def __init__(self, message: str, *, code: int = INTERRUPTED):
        super().__init__(message)
        self.exit_code = code
