"""Locks on files. A lock belongs to the process that takes it, and ends with it, however it ends."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]


@contextlib.contextmanager
def held(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Lock a file. Yields whether this process has the lock; without `wait`, another process may have it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        got = True
        if fcntl is not None:
            try:  # a record lock is not passed on to loader workers, which may outlive this process
                fcntl.lockf(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except OSError:
                got = False
        yield got
