"""Time of a process in which it waited for a processor does not count: other work on the machine shortens nothing that has a time limit."""

import os
import time

FRESH = 0.05  # seconds for which a reading is used again
_read = (0, 0.0, 0.0)  # process, when, seconds waited


def waited(pid: int | str = "self") -> float:
    """Return the seconds in which the main thread of a process was ready and had no processor; 0 where the system does not count them."""
    try:
        with open(f"/proc/{pid}/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def now() -> float:
    """Return the seconds of this process's clock."""
    global _read
    wall, pid = time.monotonic(), os.getpid()
    if pid != _read[0] or wall - _read[1] > FRESH:  # a fork has waited for nothing yet
        _read = pid, wall, waited()
    return wall - _read[2]
