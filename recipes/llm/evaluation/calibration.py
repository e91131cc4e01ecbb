"""Margins between two answers read as probabilities: how often they are right, how sure they are, and what they follow."""

import torch
from torch import Tensor
from trainworthy.core.recipe.figures import Points

BINS = 8


def preferred(margins: Tensor) -> float:
    """Share of positive margins; a tie is half of one."""
    return hits(margins).mean().item()


def hits(margins: Tensor) -> Tensor:
    """1 where the preferred answer has more, 0 where it has less, a half at a tie, (N,)."""
    return (margins > 0).double() + 0.5 * (margins == 0).double()


def bins(margins: Tensor) -> list[tuple[float, float, int]]:
    """(mean probability of the answer that is held for the better one, share of right ones, pairs) of each bin, of equally many
    pairs (Nguyen & O'Connor 2015). The Bradley-Terry probability that the preferred one wins is sigmoid(margin)."""
    sure = margins.double().abs().sigmoid()  # of the answer with the higher reward: 0.5 and above
    order = sure.argsort(stable=True)
    return [(sure[part].mean().item(), hits(margins[part]).mean().item(), len(part))
            for part in order.tensor_split(min(BINS, len(order)))]  # fmt: skip


def error(margins: Tensor) -> float:
    """Expected calibration error: the mean distance of `bins` from what they say, weighted by their pairs."""
    return sum(abs(sure - right) * n for sure, right, n in bins(margins)) / len(margins)


def reliability(margins: Tensor) -> Points:
    """What is said against what is right, a point for each bin, its bar the standard error of a share."""
    sure, right, n = map(torch.tensor, zip(*bins(margins), strict=True))
    spread = (right * (1 - right) / n).sqrt()
    return Points(
        sure.double(), right.double(), axes=("probability that it gives the preferred answer", "share that is right"),
        error=spread.double(), diagonal=True,
        note=f"Expected calibration error {error(margins):.3f} over {len(margins)} pairs, {len(n)} bins of equally many. Dashed: "
             "as sure as right; below it: too sure. Bars: one standard error.",
    )  # fmt: skip


def follows(rewards: Tensor, sizes: Tensor) -> float:
    """Rank correlation (Spearman) of rewards (N, 2) with sizes (N, 2), taken among the preferred answers and among the others, and
    averaged: what the preference itself gives either is left out. 0 where one of them does not vary.

    Ranks, since a reward that counts tokens saturates: one that was trained on nothing but length had 0.25 by differences of its
    margins (Pearson's), and 0.82 so.
    """
    return sum(_correlation(_ranks(a), _ranks(b)) for a, b in zip(rewards.T, sizes.T, strict=True)) / rewards.shape[1]


def _correlation(a: Tensor, b: Tensor) -> float:
    a, b = a - a.mean(), b - b.mean()
    size = a.norm() * b.norm()
    return (a @ b / size).item() if size > 0 else 0.0


def _ranks(values: Tensor) -> Tensor:
    """Place of each value, ties sharing theirs, (N,)."""
    _, place, n = values.unique(return_inverse=True, return_counts=True)
    return (n.cumsum(0).double() - n / 2)[place]
