"""Finds samples that are changed where they are stored: an augmentation in place, whose effect adds up over the epochs.

Arrays and tensors of two or more dimensions are compared with what they held when the loop first drew from the data set. Entries that were
zero or NaN may be filled (a cache), and targets of one dimension may be set (pseudo-labels).
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

ENTRIES, TOTAL = 200_000, 4_000_000  # of one array, evenly spaced; of all arrays of a data set
ARRAYS = 400
DEPTH = 3


def arrays(data: Any, name: str = "data", depth: int = DEPTH) -> Iterator[tuple[str, Tensor | np.ndarray]]:
    """Yield the arrays that a data set holds, with their names."""
    if isinstance(data, (Tensor, np.ndarray)):
        if data.ndim >= 2 and (isinstance(data, Tensor) or data.dtype.kind in "uif"):
            yield name, data
    elif depth and isinstance(data, (list, tuple)):
        for x in data[:ARRAYS]:
            yield from arrays(x, name, depth - 1)
    elif depth and isinstance(data, dict):
        for key, x in list(data.items())[:ARRAYS]:
            yield from arrays(x, f"{name}[{key!r}]", depth - 1)
    elif depth and isinstance(data, torch.utils.data.Dataset):
        for key, x in vars(data).items():
            yield from arrays(x, key, depth - 1)


def entries(x: Tensor | np.ndarray, most: int) -> Tensor | None:
    """Return a copy of evenly spaced entries; None of an array that is no plain memory (a file, a sparse tensor)."""
    if isinstance(x, np.memmap) or not (
        isinstance(x, np.ndarray) or (x.layout == torch.strided and x.device.type == "cpu")
    ):
        return None
    flat = x.reshape(-1) if isinstance(x, np.ndarray) else x.detach().reshape(-1)
    step = max(1, len(flat) // most) | 1  # odd: not the same place of every row
    return torch.tensor(flat[::step]) if isinstance(flat, np.ndarray) else flat[::step].clone()


class Stored:
    """What data sets held when the loop first drew from them."""

    def __init__(self) -> None:
        self.known: dict[int, list[tuple[str, Any, int, Tensor]]] = {}

    def note(self, data: Any) -> None:
        """Keep some entries of a data set's arrays, at its first pass."""
        if id(data) in self.known:
            return
        held = list(arrays(data))[:ARRAYS]
        most = min(ENTRIES, TOTAL // max(1, len(held)))
        rows = [(name, x, most, entries(x, most)) for name, x in held]
        self.known[id(data)] = [(name, x, most, copy) for name, x, most, copy in rows if copy is not None]

    def fault(self) -> tuple[str, str] | None:
        """Return which array has changed, and the cause."""
        for rows in self.known.values():
            for name, x, most, before in rows:
                now = entries(x, most)
                if now is None or now.shape != before.shape:
                    continue
                moved = (now != before) & (before != 0) & (before == before)
                if bool(moved.any()):
                    share = float(moved.float().mean())
                    return (
                        f"`{name}` of the data set has changed since the first sample was drawn (at least {share:.2%} of its entries)",
                        "an augmentation or a scaling works in place on the stored samples, and adds up over the epochs: copy the sample first",
                    )
        return None
