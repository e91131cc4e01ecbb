"""Finds batches that hold one sample many times, with the targets of all of them."""

import torch
from torch import Tensor
from trainworthy.core.base.verdict import Fault

LEAST = 8  # batches, and samples of a batch
ENTRIES = 64  # least size of a sample: small states and codes are often the same
WITHIN = 0.35  # largest share of the variance of all samples that is within batches. Random batches of n: (n - 1) / n and more
VARIED = 0.5  # different classes in a batch, of as many as there could be


def fault(points: list[tuple[Tensor, Tensor]]) -> Fault | None:
    """Return what is wrong with the batches (inputs (N, D), classes (N,)) of the first pass: their samples are nearly alike, augmented or not,
    and their classes are as mixed as those of other batches."""
    batches = [(x.flatten(1), y) for x, y in points if len(x) >= LEAST]
    if len(batches) < LEAST or len({x.shape[1] for x, _ in batches}) > 1 or batches[0][0].shape[1] < ENTRIES:
        return None
    classes = len(torch.cat([y for _, y in batches]).unique())
    mixed = [len(y.unique()) >= max(2, VARIED * min(classes, len(y))) for _, y in batches]
    whole = float(torch.cat([x for x, _ in batches]).var(0).sum())
    within = sum(float(x.var(0).sum()) for x, _ in batches) / len(batches)
    if not all(mixed) or not whole > 0 or within > WITHIN * whole:
        return None
    return (
        f"the inputs within a batch differ by {within / whole:.0%} of the variance of all, and their targets are of up to {classes} classes "
        f"({len(batches)} batches)",
        "all rows of a batch get the input of one: a transform or collate function reads the same row in each turn of its loop",
    )
