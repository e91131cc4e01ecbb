"""Losses that only draw two embeddings together (SimSiam, BYOL): they need two views, and a stop-gradient on one side."""

from typing import Any

from torch import Tensor
from trainworthy.core.base.verdict import Fault
from trainworthy.guard.hooks.addresses import address_of
from trainworthy.guard.measures.models.autograd import nodes

STEPS, LEAST = 40, 6  # that are followed; how many must agree
NEAR = 64  # operations between an embedding and what a predictor made of it
SAVED = ("_saved_self", "_saved_mat1", "_saved_input", "_saved_tensor1")
FACTORS, CONSTANTS = (0.25, 0.5, 1.0, 2.0), (0.0, 1.0, 2.0, 4.0)  # of usual losses: -(a + b) / 2, 2 - 2 a, 1 - a


Call = tuple[float, bool, bool]
"""A similarity: its mean, whether gradients go into both sides, whether one side was made of the other."""


class Attraction:
    """The cosine similarities of embeddings since the last backward(), and those of losses that are nothing else."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.steps: list[list[Call]] = []

    def compared(self, a: Any, b: Any, out: Any) -> None:
        """Note a cosine similarity (N,) of two embeddings (N, D)."""
        pairs = all(isinstance(x, Tensor) and x.dim() == 2 for x in (a, b)) and a.shape == b.shape
        if len(self.steps) >= STEPS or not pairs:
            return
        own = made_of(a, b) or made_of(b, a)
        self.calls.append((float(out.detach().mean()), a.requires_grad and b.requires_grad, own))

    def look(self, loss: Tensor) -> None:
        """Keep the similarities if this loss is nothing but them."""
        calls, self.calls = self.calls, []
        total = sum(mean for mean, _, _ in calls)
        value = float(loss.detach())
        if calls and any(abs(value + f * total - c) < 1e-5 for f in FACTORS for c in CONSTANTS):
            self.steps.append(calls)

    def fault(self) -> Fault | None:
        if len(self.steps) < LEAST:
            return None
        calls = [call for step in self.steps for call in step]
        if all(own for _, _, own in calls):
            return (
                f"in {len(self.steps)} steps the loss compares an embedding only with what was computed from that embedding itself",
                "each view predicts itself: compare the prediction of one view with the embedding of the other",
            )
        if all(both for _, both, _ in calls):
            return (
                f"in {len(self.steps)} steps the loss is the similarity of two embeddings alone, and gradients go into both",
                "the stop-gradient is missing (detach() on one side): equal embeddings for all samples are the best answer",
            )
        return None


def made_of(a: Tensor, b: Tensor) -> bool:
    """Return whether `a` was computed from the tensor `b`, or from what `b` is a detached copy of."""
    found = (getattr(node, name, None) for node in nodes(a.grad_fn, most=NEAR, nearest=True) for name in SAVED)
    return a.requires_grad and any(isinstance(x, Tensor) and address_of(x) == address_of(b) for x in found)
