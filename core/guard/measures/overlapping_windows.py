"""Finds windows of one series that were split at random: each window of the evaluation lies between two windows of training that share all
but a few of its steps.

A split in time has such windows at its borders alone, and there on one side.
"""

import time
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset

MOST = 8000  # windows of training
READ = 200  # of an evaluation
ROWS = 50
STEPS = 8  # of a window
SHIFTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
VARIED = 6  # different values of the part that windows share
BETWEEN = 0.4  # of the evaluation's windows


def windows(data: Any, most: int, limit: float) -> list[Tensor]:
    """Return the first entry of evenly spaced samples, if it is a series (T,) or (T, F) of numbers."""
    if isinstance(data, IterableDataset) or not hasattr(data, "__len__"):
        return []
    found = []
    for i in range(0, len(data), max(1, -(-len(data) // most))):
        if time.monotonic() > limit:
            return []
        x = next(
            (torch.as_tensor(v) for v in tree_leaves(data[i]) if isinstance(v, Tensor) or hasattr(v, "dtype")), None
        )
        if x is None or not x.is_floating_point() or x.dim() not in (1, 2) or not STEPS <= len(x) <= 4096:
            return []
        if x.dim() == 2 and x.shape[1] > len(x):  # channels first, or no series
            return []
        found.append(x.detach().cpu().contiguous())
    return found if len({x.shape for x in found}) == 1 else []


def key(x: Tensor) -> int:
    """Return a number that is equal for equal parts."""
    return hash(x.numpy().tobytes())


def check(train: DataLoader, others: list[DataLoader], limit: float) -> tuple[str, str] | None:
    """Return how many windows lie between those of training, and the cause."""
    if len(getattr(train, "dataset", ())) > MOST:
        return None
    mine = windows(train.dataset, MOST, limit)
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
                f"{between} of {len(theirs)} windows of the evaluation lie between two windows of training that share nearly all of their steps",
                "overlapping windows of one series were split at random: split the series in time, then cut the windows",
            )
    return None
