"""Finds `cross_entropy` on rows of several labels: zeros and ones that are no probabilities.

A row without a label has no loss there. Rows of several labels may be counts that a multinomial likelihood compares, as in recommenders: they
count as labels where rows without any occur, or where the same outputs go through a sigmoid in the evaluation.
"""

import weakref

from torch import Tensor

ROWS = 64
SHARE = 0.02  # rows without a label, and rows of several
CALLS = 200
STAIRS = 8  # calls


class MultiHot:
    """What the targets (N, C) of `cross_entropy` were."""

    def __init__(self) -> None:
        self.calls = self.rows = self.empty = self.several = self.squashed = 0
        self.other = False
        self.stairs = self.certain = 0  # calls with targets that are steps (1 1 0 0); those whose first column is 1
        self.width = 0
        self.output: weakref.ref | None = None  # the last output of a model without gradients

    def target(self, target: Tensor) -> None:
        """Note the target of one call in training."""
        if target.dim() != 2 or target.shape[1] < 2 or not target.is_floating_point() or self.calls >= CALLS:
            return
        self.calls += 1
        self.width = target.shape[1]
        ones = target.detach().sum(1)
        self.other |= not bool(((target == 0) | (target == 1)).all())
        self.rows += len(target)
        self.empty += int((ones == 0).sum())
        self.several += int((ones > 1).sum())

    def steps(self, target: Tensor) -> None:
        """Note the target of one call of a binary loss: cumulative targets y > k of classes in order."""
        if target.dim() == 2 and target.shape[1] > 2 and len(target) > 1 and self.stairs < CALLS:
            y = target.detach()
            ordered = bool(((y == 0) | (y == 1)).all() and (y.diff(dim=1) <= 0).all() and (y.sum(1) > 1).any())
            self.stairs += ordered
            self.certain += ordered and bool((y[:, 0] == 1).all())

    def answered(self, out: object) -> None:
        """Note a model's output in an evaluation."""
        fits = isinstance(out, Tensor) and out.dim() == 2 and out.shape[1] == self.width
        self.output = weakref.ref(out) if fits else None  # type: ignore[arg-type]

    def sigmoid(self, given: Tensor) -> None:
        """Note what went through a sigmoid."""
        self.squashed += self.output is not None and self.output() is given

    def fault(self) -> tuple[str, str] | None:
        """Return what was measured and its cause."""
        if self.stairs >= STAIRS and self.certain == self.stairs:
            return (
                f"the targets of a binary loss are steps (1 1 0 0), and the first of their columns is 1 in all {self.stairs} calls",
                "cumulative targets are y > k for k from 0: with y >= k each answer is one class too high",
            )
        if self.rows < ROWS or self.other or self.several < SHARE * self.rows:
            return None
        if self.empty < SHARE * self.rows and not (self.squashed and self.several > 0.1 * self.rows):
            return None
        also = ", and the same outputs go through a sigmoid in the evaluation" if self.squashed else ""
        return (
            f"cross_entropy gets rows of zeros and ones: {self.several} of {self.rows} have several ones, {self.empty} have none{also}",
            "labels that do not exclude each other: binary_cross_entropy_with_logits (BCEWithLogitsLoss)",
        )
