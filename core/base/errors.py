"""What stops a run, and the exit code that says which of the four ways it was."""

import errno

DONE, USAGE, GATE_FAILED, STOPPED_ITSELF, INTERRUPTED = 0, 2, 3, 4, 5


DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a device, a quota or a file that can take no more."""


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
    """SIGTERM or Ctrl-C: the state is saved, `trainworthy resume` goes on."""

    exit_code = INTERRUPTED
