"""Finds pictures and their restored versions (larger, sharper, without noise) that were flipped or turned apart: the target of many training
samples fits its input when flipped or turned, and not as it is."""

import time
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset
from trainworthy.core.base.correlation import pearson
from trainworthy.core.base.doubles import to_double
from trainworthy.guard.hooks.trees import entries
from trainworthy.guard.measures.data.alignment import turns
from trainworthy.guard.measures.data.drawn_apart import plane

SAMPLES, LEAST = 96, 24
FITS, MISSES = 0.9, 0.6  # correlation with a flipped or turned target, and with the target as it is
LEVELS = 16
SHARE, USUAL = 0.15, 0.05  # of the training samples, and of the evaluation's


def apart(train: DataLoader, evals: dict[int, DataLoader], limit: float) -> tuple[str, str] | None:
    """Compare inputs and targets of both splits."""
    count, wrong = moved(train, limit)
    if count < LEAST or wrong < SHARE * count:
        return None
    for loader in evals.values():
        known, usual = moved(loader, limit)
        if known >= LEAST and usual > USUAL * known:
            return None  # the task is to turn pictures
    return (
        f"the targets of {wrong} of {count} training samples fit their inputs when they are flipped or turned, and not as they are",
        "the augmentation draws once for the input and again for the target, or leaves one of them as it is: one draw for both",
    )


def moved(loader: DataLoader, limit: float) -> tuple[int, int]:
    """Return how many samples fit as they are or moved, and how many only moved."""
    data, count, wrong = loader.dataset, 0, 0
    if isinstance(data, IterableDataset):
        return 0, 0
    for i in range(0, len(data), max(1, len(data) // SAMPLES)):  # type: ignore[arg-type]
        pair = pictures(data[i])
        if pair is None or time.monotonic() > limit:
            break
        if any(len(x.unique()) <= LEVELS for x in pair):  # masks, and tiles of one colour
            continue
        fits = [pearson(pair[0], y) for y in turns(pair[1])]
        count += max(fits) > FITS
        wrong += fits[0] < MISSES and max(fits[1:]) > FITS
    return count, wrong


def pictures(sample: Any) -> tuple[Tensor, Tensor] | None:
    """Return the smaller and the larger picture of a sample in the size of the smaller one; None if it has not just these two."""
    leaves = [x for x in entries(sample) if x.dim() == 3 and x.is_floating_point() and min(x.shape[-2:]) >= 8]
    if len(leaves) != 2:
        return None
    small, large = sorted((plane(to_double(x)) for x in leaves), key=torch.numel)
    factor = large.shape[0] // small.shape[0]
    if tuple(large.shape) != tuple(n * factor for n in small.shape):
        return None
    return small, F.avg_pool2d(large[None, None], factor)[0, 0]
