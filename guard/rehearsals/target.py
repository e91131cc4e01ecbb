"""What is guarded: a script or a module, and its arguments."""

from dataclasses import dataclass
from pathlib import Path

BATCHES = ("get_batch", "next_batch", "get_minibatch")
"""Functions of a script whose results count as batches by default."""


@dataclass
class Target:
    """The script or module to guard."""

    path: Path
    argv: list[str]
    module: str = ""
    batches: tuple[str, ...] = BATCHES
    entry: str = ""
    """A function of the script that is called from elsewhere."""
