"""Margins between two answers as probabilities: accuracy, calibration, and correlation with length."""

import torch
from torch import Tensor
from trainworthy.core.base.correlation import spearman
from trainworthy.core.base.doubles import to_double
from trainworthy.core.recipe.figures import Points

BINS = 8


def preferred(margins: Tensor) -> float:
    """Return the share of positive margins; a tie counts half."""
    return hits(margins).mean().item()


def hits(margins: Tensor) -> Tensor:
    """Return 1 where the preferred answer has more, 0 where it has less, 0.5 at a tie, (N,)."""
    return to_double(margins > 0) + 0.5 * to_double(margins == 0)


def bins(margins: Tensor) -> list[tuple[float, float, int]]:
    """Return (mean probability of the answer with the higher reward, share of correct ones, pairs) of each bin; all bins have equally many
    pairs (Nguyen & O'Connor 2015). The Bradley-Terry probability that the preferred answer wins is sigmoid(margin)."""
    sure = margins.double().abs().sigmoid()  # of the answer with the higher reward: at least 0.5
    order = sure.argsort(stable=True)
    return [(sure[part].mean().item(), hits(margins[part]).mean().item(), len(part))
            for part in order.tensor_split(min(BINS, len(order)))]  # fmt: skip


def error(margins: Tensor) -> float:
    """Return the expected calibration error: the mean distance between confidence and accuracy of `bins`, weighted by their pairs."""
    return sum(abs(sure - right) * n for sure, right, n in bins(margins)) / len(margins)


def reliability(margins: Tensor) -> Points:
    """Return the calibration plot: accuracy against confidence, one point per bin, with the standard error of a share as its bar."""
    sure, right, n = map(torch.tensor, zip(*bins(margins), strict=True))
    spread = (right * (1 - right) / n).sqrt()
    return Points(
        sure.double(), right.double(), axes=("probability that it gives the preferred answer", "share that is right"),
        error=spread.double(), diagonal=True,
        note=f"Expected calibration error {error(margins):.3f} over {len(margins)} pairs, {len(n)} bins of equally many. Dashed: "
             "as sure as right; below it: too sure. Bars: one standard error.",
    )  # fmt: skip


def follows(rewards: Tensor, sizes: Tensor) -> float:
    """Return the rank correlation (Spearman) of rewards (N, 2) with sizes (N, 2), averaged over preferred and other answers. Computed within
    each group, so that the preference itself does not count. 0 if one of them is constant.

    Ranks, because a reward that counts tokens saturates: one trained on length alone had 0.25 by differences of its margins (Pearson) and
    0.82 by ranks.
    """
    return sum(spearman(a, b) for a, b in zip(rewards.T, sizes.T, strict=True)) / rewards.shape[1]
