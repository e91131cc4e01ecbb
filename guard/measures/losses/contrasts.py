"""Finds mistakes of contrastive losses: `cross_entropy` over the scores of N samples with the N samples of the batch."""

from typing import Any

import torch
from torch import Tensor
from trainworthy.core.base.verdict import Fault

LEAST, FIRST, LATE = 4, 8, 64  # calls: at least, before anything is learnt, after something should have been
FEWEST = 8  # samples
MASKED = -1e4  # scores below are masked
UNIT = 1e-3  # difference of a length from 1
CLOSE = 1e-4  # relative difference of equal scores
APART = 0.05  # by how much of itself a target's score is above the others'
NARROW = 0.25  # largest difference of cosines with which little can be learnt
DEPTH = 6  # operations between a product and the loss: a temperature, a mask, a transpose


def of_unit_vectors(node: Any, depth: int = 0) -> bool:
    """Return whether a node of the graph, or one up to `depth` operations before it, is a product of vectors of length 1."""
    while node is not None and node.name() != "MmBackward0" and depth:
        node, depth = (node.next_functions or ((None, 0),))[0][0], depth - 1
    if node is None or node.name() != "MmBackward0":
        return False
    lengths = node._saved_self.detach().norm(dim=1), node._saved_mat2.detach().norm(dim=0)
    return all(float((n - 1).abs().max()) < UNIT for n in lengths)


class Contrasts:
    """The scores of a batch with itself, in training."""

    def __init__(self) -> None:
        self.calls = self.hidden = self.itself = self.equal = self.cosines = self.size = 0
        self.low, self.high = float("inf"), float("-inf")

    def note(self, scores: Tensor, target: Tensor) -> None:
        """Note scores (N, N) and targets (N,) of one call, if each target is another sample's place."""
        n = target.numel()
        if n < FEWEST or scores.shape != (n, n) or target.shape != (n,) or len(target.unique()) < n:
            return
        s = scores.detach().float()
        own, diagonal, most = s.gather(1, target[:, None])[:, 0], s.diagonal(), s.max(1).values
        open_ = s[s > MASKED]
        if not len(open_):
            return
        self.calls, self.size = self.calls + 1, n
        self.cosines += of_unit_vectors(scores.grad_fn, DEPTH)
        self.low, self.high = min(self.low, float(open_.min())), max(self.high, float(open_.max()))
        self.hidden += bool((own < MASKED).all())
        foreign = bool((target != torch.arange(n, device=target.device)).all())
        near = CLOSE * most.abs()
        itself = foreign and bool((diagonal >= most - near).all()) and torch.allclose(s, s.T, CLOSE, CLOSE)
        self.itself += itself
        if self.calls <= FIRST and not itself:
            level = bool((own >= most - near).all()) and float(own.max() - own.min()) <= CLOSE * float(own.abs().max())
            self.equal += level and float(own.mean() - open_.mean()) > APART * abs(float(own.mean()))

    def fault(self) -> Fault | None:
        """Return what is wrong, and the cause."""
        if self.calls < LEAST:
            return None
        what = f"cross_entropy gets the scores of {self.size} samples with each other"
        if self.hidden == self.calls:
            return (
                f"{what}, and those of all targets are masked",
                "a sample's target is its own place, which is masked: it must be the place of its other view",
            )
        if self.itself == self.calls:
            return (
                f"{what}; the largest in each row is that of a sample with itself, which is not the target",
                "the diagonal is not masked (fill_diagonal_(-inf)): each sample is its own negative",
            )
        if self.equal == min(self.calls, FIRST):
            return (
                f"{what}; from the first step on those of all targets are equal, and the largest of their rows",
                "the two views of a sample are the same: draw the augmentation for each of them",
            )
        # Products of small vectors start as narrow, and grow
        if self.calls >= LATE and self.cosines == self.calls and self.high - self.low < NARROW:
            return (
                f"{what}; in all {self.calls} calls they lie between {self.low:.3g} and {self.high:.3g}",
                "the temperature divides the scores: 0.05 to 0.5 are usual, a larger one leaves nothing to learn",
            )
        return None
