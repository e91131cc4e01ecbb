"""Looks at the terms of a loss, one by one: which way does each push the outputs, towards the targets or away from them?

Only class numbers and masks of zeros and ones are looked at, and only while the outputs do not follow the targets yet. What a
curve over the outputs explains is subtracted from pushes and targets: a term that does not depend on the targets (a penalty, an
entropy) then pushes neither way.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from trainworthy.core.base.correlation import pearson
from trainworthy.core.base.doubles import to_double
from trainworthy.guard.hooks.trees import tensors

LOOKS = 8  # backward() calls that are looked at
SUMS = {"AddBackward0": (1.0, 1.0), "SubBackward0": (1.0, -1.0)}
SCALED = ("MulBackward0", "DivBackward0")  # by a scaler, or by the number of batches of an accumulated step
CLEAR = 0.4  # correlation
OPEN = 0.5  # share of the targets' variance that the outputs do not explain
MOST = 20_000  # entries of an output


class Terms:
    """Correlations of each term's pull with the targets."""

    def __init__(self) -> None:
        self.looks = 0
        self.outputs: list[Tensor] = []
        self.rows: list[list[float]] = []

    def root(self, out: Any) -> None:
        """Note a model's outputs in training."""
        found = [x for x in tensors(out) if x.requires_grad and x.dim()]
        self.outputs = [*self.outputs, *found[:1]][-2:]

    def look(self, loss: Tensor, batch: list[Tensor]) -> None:
        """Take the gradients of a loss's terms before its backward()."""
        outputs, self.outputs = self.outputs, []
        if self.looks >= LOOKS or loss.numel() != 1 or len(outputs) != 1 or loss.grad_fn is None:
            return
        self.looks += 1
        edge = GradientEdge(loss.grad_fn, loss.output_nr)
        while edge.node.name() in SCALED and len([n for n, _ in edge.node.next_functions if n is not None]) == 1:
            edge = next(GradientEdge(n, k) for n, k in edge.node.next_functions if n is not None)
        parts = list(addends(edge, 1.0))
        target = next((t for x in batch if (t := wanted(x, outputs[0])) is not None), None)
        if target is None or not 1 < len(parts) <= 8:
            return
        where = torch.linspace(0, target.numel() - 1, min(target.numel(), MOST)).long().to(target.device)
        o, y = (to_double(v.detach().flatten()[where]) for v in (outputs[0], target))
        left = residual_of_curve(y, o)
        if float(left.var()) < OPEN * float(y.var()):
            return
        row = []
        for edge, sign in parts:
            weight = loss.new_tensor(-sign)
            (pull,) = torch.autograd.grad(edge, outputs[0], weight, retain_graph=True, allow_unused=True)
            pulled = None if pull is None else residual_of_curve(to_double(pull.detach().flatten()[where]), o)
            row.append(0.0 if pulled is None else pearson(pulled, left))
        self.rows.append(row)


def addends(edge: GradientEdge, sign: float) -> Iterator[tuple[GradientEdge, float]]:
    """Yield the terms of a sum, with their signs."""
    signs, below = SUMS.get(edge.node.name()), edge.node.next_functions
    if signs is None or len(below) != 2 or any(n is None for n, _ in below):
        yield edge, sign
        return
    for (node, k), own in zip(below, signs, strict=True):
        yield from addends(GradientEdge(node, k), sign * own)


def wanted(x: Tensor, output: Tensor) -> Tensor | None:
    """Return targets in the shape of the output: a mask of zeros and ones, or class numbers as one-hot rows."""
    if x.dtype == torch.int64 and output.dim() > 1 and x.shape == output[:, 0].shape:
        classes = output.shape[1]
        if x.numel() and int(x.min()) >= 0 and int(x.max()) < classes > 1 and int(x.min()) < int(x.max()):
            return torch.nn.functional.one_hot(x, classes).movedim(-1, 1).to(output.dtype)
    same = [n for n in x.shape if n > 1] == [n for n in output.shape if n > 1]
    if same and x.numel() >= 16 and bool(((x == 0) | (x == 1)).all()) and bool((x != x.flatten()[0]).any()):
        return x.to(output.dtype).reshape(output.shape)
    return None


def residual_of_curve(y: Tensor, o: Tensor) -> Tensor:
    """Return what a curve over the outputs leaves of y."""
    z = (o - o.mean()) / o.std().clamp_min(1e-12)
    a = torch.stack([torch.ones_like(z), z, z**2, z**3, z.sigmoid()], 1)
    return y - a @ torch.linalg.lstsq(a, y[:, None]).solution[:, 0]


def check(one: Terms) -> tuple[tuple[str, str] | None, str]:
    """Return which term pushes the outputs away from the targets while another pulls them there, and what was measured."""
    rows = [r for r in one.rows if len(r) == len(one.rows[0])]
    if len(rows) < 3:
        return None, ""
    each = [[r[i] for r in rows] for i in range(len(rows[0]))]
    towards = [i for i, found in enumerate(each) if min(found) > CLEAR]
    away = [i for i, found in enumerate(each) if max(found) < -CLEAR]
    measured = f"of {len(each)} terms of the loss {len(towards)} push the outputs towards the targets"
    if towards and away:
        return (
            f"term {away[0] + 1} of {len(each)} of the loss pushes the outputs away from the targets (correlation "
            f"{sum(each[away[0]]) / len(rows):.2f}), term {towards[0] + 1} towards them",
            "the sign of a term is wrong: a score (dice, overlap, similarity) is added where 1 - score is meant",
        ), measured
    return None, measured if towards else ""
