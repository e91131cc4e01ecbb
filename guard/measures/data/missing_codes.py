"""Finds codes of an evaluation that were given anew from its own rows: numbered without a gap, although rare values of training are missing
there.

How many codes a sample of this size leaves out by chance follows from their shares in training. A sample that is encoded like training has
about that many gaps; one that is encoded anew has none.
"""

import torch
from torch import Tensor

KNOWN = 16  # codes, at least
MISSING = 12.0  # codes that should be missing; by chance none is then missing in one of 160,000 samples
GAPS = 0.1  # of these that may be missing
WIDEST = 50_000
DRAWS = 24


def renumbered(train: Tensor, other: Tensor) -> str:
    """Return how the codes (N,) of an evaluation were given anew; empty if they were not. Whole numbers of any type are read."""
    if len(other) < KNOWN or not whole(train) or not whole(other):
        return ""
    a, b = train.long(), other.long()
    if min(int(a.min()), int(b.min())) < 0 or max(int(a.max()), int(b.max())) >= WIDEST:
        return ""
    size = int(max(a.max(), b.max())) + 1
    counts, theirs = (torch.bincount(x, minlength=size).double() for x in (a, b))
    if int((counts > 0).sum()) < KNOWN or float(theirs[counts == 0].sum()) > 0.02 * len(b):
        return ""
    share = counts / counts.sum()
    low, high = int(b.min()), int(b.max())
    within = torch.zeros(size, dtype=torch.bool)
    within[low : high + 1] = True
    within &= counts > 0
    expected = float(((1 - share[within]) ** len(b)).sum())
    gaps = int((within & (theirs == 0)).sum())
    if expected < MISSING or gaps > GAPS * expected or not as_drawn(share, theirs / len(b), len(b)):
        return ""
    return (
        f"{int((counts > 0).sum())} codes in training; {len(b):,} rows of the evaluation should miss {expected:.0f} of those from {low} to "
        f"{high}, and miss {gaps}"
    )


def as_drawn(share: Tensor, other: Tensor, n: int) -> bool:
    """Return whether shares look as those of `n` draws if codes are ranked by their share, and do not if they are compared one by one."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.bincount(torch.multinomial(share, n, replacement=True, generator=generator), minlength=len(share)) / n
             for _ in range(DRAWS)]  # fmt: skip
    distance, ranked = zip(*(distances(share, x.double()) for x in drawn), strict=True)
    found = distances(share, other)
    a, r = torch.tensor(distance), torch.tensor(ranked)
    return bool(found[0] > a.mean() + 8 * a.std() and abs(found[1] - r.mean()) < 6 * r.std() + 0.01)


def distances(a: Tensor, b: Tensor) -> tuple[float, float]:
    """Return the part of the rows that two distributions over codes do not share, code by code and by rank."""
    return float((a - b).abs().sum() / 2), float((a.sort().values - b.sort().values).abs().sum() / 2)


def whole(x: Tensor) -> bool:
    """Return whether a column holds whole numbers."""
    return not x.is_complex() and (not x.is_floating_point() or bool((x == x.round()).all()))
