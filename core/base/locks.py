"""Locks on files. A lock belongs to the process that takes it, and ends with it, however it ends."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]


@contextlib.contextmanager
def held(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Lock a file, and write this process's id into it. Yields whether this process has the lock; without `wait`, another process may
    have it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        got = True
        if fcntl is not None:
            try:  # a record lock is not passed on to loader workers, which may outlive this process
                fcntl.lockf(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except OSError:
                got = False
        if got:
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
        yield got


def holder(path: Path) -> int | None:
    """Return the id of the process that wrote last into a lock's file; None if nothing is in it."""
    text = path.read_text()
    return int(text) if text.isdigit() else None
