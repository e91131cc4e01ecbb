"""The trainer of transformers or TRL that trains, and rows of its data."""

import gc
import sys
from collections.abc import Collection
from typing import Any

from torch import nn


def trainer_of(stepped: Collection[int]) -> Any:
    """Return the last trainer whose model has one of these parameters (ids); None if there is none."""
    library = sys.modules.get("transformers.trainer")
    if library is None or not hasattr(library, "Trainer"):
        return None
    known = [
        o
        for o in gc.get_objects()
        if issubclass(type(o), library.Trainer)
        and isinstance(getattr(o, "model", None), nn.Module)
        and any(id(p) in stepped for p in o.model.parameters())
    ]
    return known[-1] if known else None


def spread(rows: Any, most: int) -> list[Any]:
    """Return evenly spaced rows, about `most` of them and up to twice as many."""
    return [rows[i] for i in range(0, len(rows), max(1, len(rows) // most))]
