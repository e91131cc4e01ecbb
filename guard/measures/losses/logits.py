"""Looks at how the scores of a class loss were made: a view that mixes classes and places, and cosines that nothing scales."""

import math

import torch
from torch import Tensor
from trainworthy.core.base.verdict import Fault
from trainworthy.guard.measures.losses.contrasts import Contrasts, of_unit_vectors
from trainworthy.guard.measures.models.autograd import beyond
from trainworthy.guard.measures.records import VIEWS

LEAST, MANY = 4, 8  # calls, classes
TURNED = ("TBackward0", "TransposeBackward0", "PermuteBackward0")


class Logits:
    """The scores of cross-entropies in training."""

    def __init__(self) -> None:
        self.calls = self.mixed = self.turned = self.cosines = self.classes = 0
        self.old: tuple[int, ...] = ()
        self.contrasts = Contrasts()

    def note(self, scores: Tensor) -> None:
        """Note the scores (N, C) or (N, C, places) of one call."""
        self.calls += 1
        node = scores.grad_fn
        if node is None or self.calls > 4 * MANY:
            return
        if scores.dim() > 2:
            self._places(scores)
            return
        if scores.dim() != 2:
            return
        if node.name() in VIEWS:
            old = tuple(int(n) for n in node._saved_self_sym_sizes)  # type: ignore[attr-defined]
            if len(old) >= 3 and old[1] == scores.shape[1] != old[-1]:
                self.mixed, self.old = self.mixed + 1, old
        node = beyond(node, TURNED)  # the loss of the other direction
        if node.name() == "MmBackward0" and scores.shape[1] >= MANY:
            self.cosines += of_unit_vectors(node)
            self.classes = scores.shape[1]

    def _places(self, scores: Tensor) -> None:
        """Note scores (N, C, places) that are a view of (..., C): their second axis steps over places, and not over classes."""
        node = scores.grad_fn
        if node.name() not in VIEWS:  # type: ignore[union-attr]
            return
        old = tuple(int(n) for n in node._saved_self_sym_sizes)  # type: ignore[union-attr]
        classes = scores.shape[1]
        if len(old) >= 2 and old[-1] == classes > 1 and classes not in old[1:-1] and scores[0, 0].numel() > 1:
            self.turned, self.old = self.turned + 1, old

    def fault(self) -> Fault | None:
        """Return what is wrong, and the cause."""
        seen = min(self.calls, 4 * MANY)
        if fault := self.contrasts.fault():
            return fault
        if seen < LEAST:
            return None
        if self.mixed == seen:
            return (
                f"cross_entropy gets the rows of a view of {self.old}: each holds the score of one class at many places",
                "reshape() or view() does not move the classes to the last axis: transpose or permute them first",
            )
        if self.turned == seen:
            return (
                f"cross_entropy wants the classes on the second axis and gets a view of {self.old}, whose classes are on the last one: "
                "each score is that of another place and class",
                "view() or reshape() does not move the classes to the second axis: transpose or permute them",
            )
        if self.cosines == seen:
            least = math.log(1 + (self.classes - 1) * math.exp(-2))
            return (
                f"cross_entropy gets cosines, between -1 and 1, of {self.classes} candidates: the loss cannot fall below {least:.3g}",
                "the cosines are not divided by a temperature (0.05 to 0.5 are usual)",
            )
        return None


@torch.no_grad()
def classes_last(y: Tensor, like: Tensor) -> Tensor | None:
    """Return scores (B, C, T) of tokens (B, T) as (B, T, C); None for any other shape."""
    fits = y.dim() == like.dim() + 1 and y.shape[:1] + y.shape[2:] == like.shape and y.shape[1] > 1
    return y.movedim(1, -1) if fits else None
