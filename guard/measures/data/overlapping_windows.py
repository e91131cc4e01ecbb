"""Finds windows of one series that were split at random: each window of the evaluation lies between two windows of training that share all
but a few of its steps.

A split in time has such windows at its borders alone, and there on one side.
"""

import time
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader
from trainworthy.guard.measures.data.spaced import spaced

MOST = 8000  # most training windows that are read
READ = 200  # most evaluation windows that are read
ROWS = 50
STEPS = 8  # least length of a window
SHIFTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
VARIED = 6  # least number of different values in the part that two windows share
BETWEEN = 0.4  # fraction of the evaluation's windows that must be between two training windows


def window(sample: Any) -> Tensor | None:
    """Return the first entry of a sample, if it is a series (T,) or (T, F) of numbers."""
    x = next((torch.as_tensor(v) for v in tree_leaves(sample) if isinstance(v, Tensor) or hasattr(v, "dtype")), None)
    if x is None or not x.is_floating_point() or x.dim() not in (1, 2) or not STEPS <= len(x) <= 4096:
        return None
    if x.dim() == 2 and x.shape[1] > len(x):  # channels first, or no series
        return None
    return x.detach().cpu().contiguous()


def windows(data: Any, most: int, limit: float, *, whole: bool = False) -> list[Tensor]:
    """Return evenly spaced windows, if all have one shape."""
    found = spaced(data, most, limit, window, whole=whole)
    return found if len({x.shape for x in found}) == 1 else []


def key(x: Tensor) -> int:
    """Return a number that is equal for equal parts."""
    return hash(x.numpy().tobytes())


def check(train: DataLoader, others: list[DataLoader], limit: float) -> tuple[str, str] | None:
    """Return how many windows lie between those of training, and the cause."""
    mine = windows(train.dataset, MOST, limit, whole=True)
    if len(mine) < ROWS:
        return None
    long = len(mine[0])
    for other in others:
        theirs = [x for x in windows(other.dataset, READ, limit) if len(x) == long and x.shape == mine[0].shape]
        if len(theirs) < ROWS:
            continue
        before, after = [False] * len(theirs), [False] * len(theirs)
        for s in (s for s in SHIFTS if s <= long // 2):
            if time.monotonic() > limit:
                return None
            ends, begins = {key(x[s:]) for x in mine}, {key(x[:-s]) for x in mine}
            for i, x in enumerate(theirs):
                if len(x[s:-s].unique()) >= VARIED:
                    before[i] |= key(x[:-s]) in ends
                    after[i] |= key(x[s:]) in begins
        between = sum(a and b for a, b in zip(before, after, strict=True))
        if between >= BETWEEN * len(theirs):
            return (
                f"{between} of {len(theirs)} windows of the evaluation are between two windows of training that share nearly all of their steps",
                "overlapping windows of one series were split at random: split the series in time, then cut the windows",
            )
    return None
