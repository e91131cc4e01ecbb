"""Finds a loss that broadcasts (N, 1) against (N,) to all N x N pairs, where one value for each sample is meant.

A matrix of all pairs is often meant (ranking, radial bases, distances). It is a fault only if the loss is a plain mean of it: between the
matrix and `backward()` there are sums, products, powers and clamps, but no layer, no logarithm, no selection of pairs.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from trainworthy.core.base.doubles import to_double
from trainworthy.guard.hooks.addresses import home_of
from trainworthy.guard.measures.models.autograd import nodes

LOOKS = 24  # backward() calls whose graph is read
FEWEST = 4  # least number of samples
SUMS_FROM = 8  # least number of samples at which the rank of a matrix shows how it was made
NODES = 400  # most nodes of a loss's graph that are read
PLAIN = {"AddBackward0", "SubBackward0", "RsubBackward1", "MulBackward0", "DivBackward0", "NegBackward0", "MeanBackward0", "MeanBackward1",
         "SumBackward0", "SumBackward1", "PowBackward0", "AbsBackward0", "MinimumBackward0", "MaximumBackward0", "ClampBackward0",
         "ClampMinBackward0", "ClampMaxBackward0", "SqrtBackward0", "WhereBackward0", "MseLossBackward0", "SmoothL1LossBackward0",
         "HuberLossBackward0", "ExpandBackward0", "StackBackward0", "ToCopyBackward0", "ViewBackward0", "SqueezeBackward0",
         "SqueezeBackward1", "UnsqueezeBackward0"}  # fmt: skip
"""Operations after which a mean is still a mean over all pairs."""
PRODUCTS = ("MulBackward0", "DivBackward0")


class Outer:
    """Differences, losses and products of a column (N, 1) and a row (N,) whose result is the loss."""

    def __init__(self) -> None:
        self.looks = 0
        self.meant = False  # the script compares all pairs of one tensor's values
        self.noted: dict[Any, str] = {}  # node of a graph -> shapes that were combined there
        self.found: list[str] = []

    def note(self, a: Tensor, b: Tensor, out: Tensor, name: str = "a difference") -> None:
        """Record a difference, or a loss with `reduction="none"`."""
        if self.looks >= LOOKS or min(a.numel(), b.numel()) < FEWEST:
            return
        if crosses(a.shape, b.shape) and home_of(a) == home_of(b):
            self.meant = True
        if out.grad_fn is None or a.requires_grad == b.requires_grad:
            return
        prediction, target = (a, b) if a.requires_grad else (b, a)
        if len(self.noted) >= LOOKS:  # of graphs whose gradients are taken in another way: let go of them
            self.noted = {}
        shapes = f"{name} of {tuple(a.shape)} and {tuple(b.shape)}"
        if crosses(a.shape, b.shape):
            self.noted[out.grad_fn] = f"{shapes} became {(len(a), len(a))}"
        elif is_row(prediction.shape) and len(prediction) == len(target) and sum_of_two(target):
            self.noted[out.grad_fn] = f"{shapes}, where each row has the values of all samples"

    def look(self, loss: Tensor) -> None:
        """Search the graph of a loss for recorded operations and for products."""
        noted, self.noted = self.noted, {}
        if self.looks >= LOOKS or loss.numel() != 1 or loss.grad_fn is None:
            return
        self.looks += 1
        for node in nodes(loss.grad_fn, most=NODES, only=PLAIN):
            text = noted.get(node) or product(node, loss)
            if text:
                self.found.append(text)
                return

    def fault(self) -> tuple[str, str] | None:
        """Return what was measured and its cause."""
        if len(self.found) < 3 or self.meant:
            return None
        return self.found[0], "a squeeze() or unsqueeze() is missing: every prediction meets every target"


def crosses(a: torch.Size, b: torch.Size) -> bool:
    """Return whether one shape is (N, 1) and the other (N,)."""
    a, b = (a, b) if len(a) > len(b) else (b, a)
    return len(a) == 2 and a[1] == 1 and b == a[:1] and a[0] > 1


def is_row(shape: torch.Size) -> bool:
    """Return whether there is one value for each sample."""
    return len(shape) in (1, 2) and shape.numel() == shape[0]


def sum_of_two(x: Tensor) -> bool:
    """Return whether a square matrix was made of a column and a row: it varies along both, and its rank is at most 2."""
    if x.requires_grad or x.dim() != 2 or x.shape[0] != x.shape[1] or not SUMS_FROM <= len(x) <= 4096:
        return False
    part = to_double(x[:64, :64])
    if not bool((part.std(0).amax() > 0) & (part.std(1).amax() > 0)):
        return False
    sizes = torch.linalg.svdvals(part)
    return bool(sizes[2] < 1e-5 * sizes[0])


def product(node: Any, loss: Tensor) -> str:
    """Return the shapes of a product of a row and a column of which one has a gradient, and is computed by a model."""
    below = [GradientEdge(n, k) for n, k in node.next_functions if n is not None]
    if node.name() not in PRODUCTS or len(below) != 1 or below[0].node.name() == "torch::autograd::AccumulateGrad":
        return ""
    kept = [getattr(node, name, None) for name in ("_saved_self", "_saved_other")]
    other = next((x for x in kept if isinstance(x, Tensor) and x.dim()), None)
    if other is None or other.requires_grad or other.numel() < FEWEST or not (is_row(other.shape) or sum_of_two(other)):
        return ""
    (found,) = torch.autograd.grad(loss, below[0], retain_graph=True, allow_unused=True)  # it has the operand's shape
    if found is None:
        return ""
    mine = found.shape
    if crosses(mine, other.shape):
        return f"a product of {tuple(mine)} and {tuple(other.shape)} became {(len(other), len(other))}"
    if is_row(mine) and other.dim() == 2 and len(other) == other.shape[1] == mine[0]:
        return f"a product of {tuple(mine)} and {tuple(other.shape)}, where each row has the values of all samples"
    return ""
