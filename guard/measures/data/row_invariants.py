"""What holds of every sample that a model gets in training, exactly, and of none in the evaluation: a mean of zero, a norm of one, a sum
of one, a range from 0 to 1, each over the sample's own values. Preparing a sample leaves such a mark; without the preparation it is lost."""

from collections.abc import Callable

import torch
from torch import Tensor

ROWS = 64  # samples of each side that decide
CALLS, EACH = 100, 64  # calls that are read, and samples of each
HELD, BROKEN = 0.95, 0.1  # share of training's samples that have the mark at least, of the evaluation's at most
FAR = 0.1  # least difference of an evaluation's sample from the mark: noise on purpose, an attack, rounding to bytes stay below
EXACT = 2e-3


def _centred(x: Tensor) -> Tensor:
    """(N, K) -> distance of each sample's mean from 0, in its standard deviations."""
    return x.mean(1).abs() / x.std(1).clamp_min(1e-12)


def _norm(x: Tensor) -> Tensor:
    return (x.norm(dim=1) - 1).abs()


def _total(x: Tensor) -> Tensor:
    """Of samples without negative values."""
    return torch.where(x.amin(1) >= 0, (x.sum(1) - 1).abs(), torch.inf)


def _span(x: Tensor) -> Tensor:
    return torch.maximum(x.amin(1).abs(), (x.amax(1) - 1).abs())


def _largest(x: Tensor) -> Tensor:
    return (x.abs().amax(1) - 1).abs()


def _columns(x: Tensor) -> Tensor:
    """(N, T, F) -> the largest distance of a column's mean over T from 0, in its standard deviations."""
    return (x.mean(1).abs() / x.std(1).clamp_min(1e-12)).amax(1)


MARKS: dict[str, Callable[[Tensor], Tensor]] = {
    "the mean of its values is 0": _centred,
    "the norm of its values is 1": _norm,
    "its values are positive and their sum is 1": _total,
    "its values go from 0 to 1": _span,
    "its largest absolute value is 1": _largest,
    "the mean of each of its columns over its places is 0": _columns,
}
"""A mark -> how far samples are from it."""


class Invariants:
    """Counts how many samples have each mark, and how many are far from it."""

    def __init__(self) -> None:
        self.calls = 0
        self.counts = {name: [0, 0, 0] for name in MARKS}
        """samples, those that have it, those far from it"""

    def read(self, x: Tensor) -> None:
        """Note the samples of one input (N, ...)."""
        self.calls += 1
        if self.calls > CALLS or x.dim() < 2 or not len(x) or x[0].numel() < 4:
            return
        some = x.detach()[:EACH].float().cpu()
        flat = some.flatten(1)
        flat_rows = flat.std(1) > 1e-6  # a blank sample has no mark to lose
        if not flat_rows.all() or not flat.isfinite().all():
            some, flat = some[flat_rows], flat[flat_rows]
        for name, far in MARKS.items():
            if len(flat) and (far is not _columns or (some.dim() == 3 and some.shape[1] > 3)):
                distance = far(some if far is _columns else flat)
                count = self.counts[name]
                count[0] += len(distance)
                count[1] += int((distance <= EXACT).sum())
                count[2] += int((distance > FAR).sum())

    def holds(self, name: str) -> bool:
        """Return whether enough samples were seen, and nearly all have the mark."""
        n, held, _ = self.counts[name]
        return n >= ROWS and held >= HELD * n

    def broken(self, name: str) -> bool:
        """Return whether enough samples were seen, hardly any has the mark, and nearly all are far from it."""
        n, held, far = self.counts[name]
        return n >= ROWS and held <= BROKEN * n and far >= HELD * n


def lost(trained: Invariants, others: list[Invariants]) -> str:
    """Return the mark that training's samples have and no evaluation's; empty if there is none, or if another one is kept: classes in
    training, their probabilities in the evaluation, both with a sum of 1."""
    others, found = [one for one in others if one.calls], ""
    for name in MARKS if others else ():
        if trained.holds(name) and all(one.holds(name) for one in others):
            return ""
        if not found and trained.holds(name) and all(one.broken(name) for one in others):
            n, far = (sum(one.counts[name][i] for one in others) for i in (0, 2))
            found = f"of every sample in training {name}; {far} of {n} samples of the evaluation are far from that"
    return found
