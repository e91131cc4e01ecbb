"""Finds label smoothing and class weights of a script's loss by experiment.

The loss is called with a stub model that returns chosen logits. A loss that needs more than logits from its model (a
second output, a method) cannot be tested this way; then nothing is assumed.
"""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

MARGINS = (4.0, 8.0, 16.0)
EXACT = 1e-3


class _Stub(nn.Module):
    """Returns the same logits for every input."""

    def __init__(self, answer: Tensor):
        super().__init__()
        self.answer = answer

    def forward(self, *_: Any, **__: Any) -> Tensor:
        return self.answer


@dataclass
class Objective:
    """Recognised properties of a classification loss."""

    smoothing: float = 0.0
    classes: int = 0
    weights: dict[int, float] = field(default_factory=dict)
    """Weight of each class, relative to the first; empty: all equal."""
    own_target: bool = False
    """Whether the input is the target. How low such a loss can be is not known (a VAE's)."""

    @property
    def floor(self) -> float:
        return smoothing_floor(self.smoothing, self.classes) if self.smoothing else 0.0

    def __str__(self) -> str:
        found = []
        if self.smoothing:
            floor = f"loss_floor={self.floor:.4f}"
            found.append(f"label smoothing {self.smoothing:.3g} over {self.classes} classes ({floor})")
        if self.weights:
            listed = ", ".join(f"{w:.3g}" for w in list(self.weights.values())[:12])
            found.append(f"class weights {listed} (relative; count=lambda batch: weights[target].sum())")
        return "; ".join(found)


def smoothing_floor(eps: float, classes: int) -> float:
    """Return the entropy of a target that spreads `eps` evenly over all `classes` and gives the rest to one."""
    right, wrong = 1 - eps + eps / classes, eps / classes
    return -right * math.log(right) - (classes - 1) * wrong * math.log(wrong)


def recognise(
    loss: Callable[[nn.Module, Any], Tensor], batches: list[tuple[Any, Tensor]], model: nn.Module
) -> Objective:
    """Analyse `loss(model, batch)` with (batch, labels (n,)) pairs. Returns an empty result if it is no cross-entropy
    of logits (n, K)."""
    found = Objective()
    with contextlib.suppress(Exception), torch.no_grad():  # an unknown loss may raise anything in this experiment
        batch, labels = batches[0]
        answers: list[Tensor] = []
        with model.register_forward_hook(lambda _, __, out: answers.append(out)):
            loss(model, batch)
        if not answers or not isinstance(answers[0], Tensor) or answers[0].shape[:-1] != labels.shape:
            return found
        classes, device = answers[0].shape[-1], answers[0].device

        def at(batch: Any, labels: Tensor, margin: float) -> float:
            logits = torch.zeros(len(labels), classes, device=device)
            logits[torch.arange(len(labels)), labels.long()] = margin
            return float(loss(_Stub(logits), batch))

        found.classes = classes
        found.smoothing = _smoothing([at(batch, labels, m) for m in MARGINS], classes)
        found.weights = _weights(loss, batches, classes, device) if not found.smoothing else {}
    return found


def _smoothing(losses: list[float], classes: int) -> float:
    """Return the smoothing that fits all losses at `MARGINS`; 0 if none does."""
    plain = [math.log(1 + (classes - 1) * math.exp(-m)) for m in MARGINS]
    eps = [(found - p) / m * classes / (classes - 1) for found, p, m in zip(losses, plain, MARGINS, strict=True)]
    return round(eps[-1], 6) if EXACT < eps[-1] < 1 and max(eps) - min(eps) < EXACT else 0.0


def _weights(loss: Callable, batches: list[tuple[Any, Tensor]], classes: int, device: torch.device) -> dict[int, float]:
    """Return the class weights of a weighted mean: a sample of class c with a higher loss pulls the mean by its weight.
    All logits are zero except one class, which then has a lower loss."""
    rows: list[Tensor] = []
    values: list[float] = []
    for batch, labels in batches:
        for c in labels.unique().tolist():
            logits = torch.zeros(len(labels), classes, device=device)
            logits[labels == c, int(c)] = 2.0
            high, low = math.log(classes), math.log(1 + (classes - 1) * math.exp(-2.0))
            share = (high - float(loss(_Stub(logits), batch))) / (high - low)  # class c's weight in the batch
            counts = torch.bincount(labels.long().cpu(), minlength=classes).double()
            row = -share * counts
            row[int(c)] += counts[int(c)]
            rows.append(row)
            values.append(share)
    seen = [c for c in range(classes) if any(r[c].abs() > 0 for r in rows)]
    system = torch.stack(rows)[:, seen]
    _, sizes, directions = torch.linalg.svd(system)
    solution = directions[-1]
    if len(seen) < 2 or sizes[-1] > EXACT * sizes[0]:
        return {}
    if solution.abs().min() < 1e-9 or not (solution / solution[0] > 0).all():
        return {}
    ratios = (solution / solution[0]).tolist()
    return {} if max(ratios) < min(ratios) * (1 + 10 * EXACT) else dict(zip(seen, ratios, strict=True))
