"""Counts the rows that TRL leaves out of a data set, which it reports by a progress bar alone. Imports no library of trainers."""

from typing import Any


class DroppedRows:
    """(description, rows before, rows after) of each filter with which TRL drops rows, for example without a scored token."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, int, int]] = []

    def note(self, kept: Any, rows: Any, *_: Any, desc: Any = None, **__: Any) -> None:
        """Note the result and the arguments of one call of `Dataset.filter`."""
        if str(desc).startswith("Dropping"):
            self.rows.append((desc, len(rows), len(kept)))
