"""Learnt weights of a loss (of its terms, by uncertainty) that fall to zero, because the loss has no lowest value at a finite weight."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

FEW = 16  # entries of a parameter of weights: one for each term
FAR = 20.0  # a logarithm of a weight at which the weight is 1e-9
NONE_LEFT = 1e-6  # of the loss: less is zero
PROPORTIONAL = 1e-3  # relative difference of two factors
SAME = 0.05  # relative difference of two falls over equal distances, if the loss falls along a line


def explain_lost_weights(
    model: nn.Module, parameters: dict[str, nn.Parameter], losses: Callable[[], dict[str, float]]
) -> tuple[str, str]:
    """Return (fault, cause) if the loss falls without limit, or to zero, as a parameter that no output of the model depends on falls or
    rises; both empty if none does. For the uncertainty weighting exp(-s) L + s / 2 the loss rises in both directions.

    Args:
        parameters: those that train, by name.
        losses: returns the terms of the loss of one batch, with the same random draws each time.
    """
    for name, p in parameters.items():
        owner = type(model.get_submodule(name.rpartition(".")[0]))
        if p.numel() > FEW or owner.__module__.startswith("torch."):
            continue
        if not _is_of_the_loss(model, p, losses):
            continue
        for direction in (-1.0, 1.0):
            near, far, farther, farthest = (_at(p, direction * k * FAR, losses) for k in range(4))
            first, second = far - farther, farther - farthest
            if min(near - far, second) > 0 > farthest and abs(first - second) <= SAME * second:
                return _words(name, direction, f"{near:.3g}, {far:.3g} and {farther:.3g}: without limit")
            if 0 <= far <= NONE_LEFT * near and _is_proportional(p, direction, near, losses):
                return _words(name, direction, f"{near:.3g}, {far:.3g} and {farther:.3g}: to zero")
    return "", ""


def _words(name: str, direction: float, values: str) -> tuple[str, str]:
    way = "falls" if direction < 0 else "rises"
    return (
        f"the loss falls as '{name}' {way}, which no output of the model depends on (by 0, {FAR:g} and {2 * FAR:g}: {values})",
        f"the optimiser makes the loss small by '{name}' alone: a sign is wrong, or the term that keeps the weights up is missing "
        "(for s = log(variance): exp(-s) * loss + s / 2)",
    )


def _is_proportional(p: nn.Parameter, direction: float, near: float, losses: Callable[[], dict[str, float]]) -> bool:
    """Return whether the loss is multiplied by one number for each step of `p`: a softmax's temperature does not do that."""
    one, two = (_at(p, direction * by, losses) for by in (1, 2))
    return near > 0 and one > 0 and abs(one / near - two / one) <= PROPORTIONAL * one / near


def _at(p: nn.Parameter, by: float, losses: Callable[[], dict[str, float]]) -> float:
    """Return the loss with all entries of `p` moved."""
    own = p.detach().clone()
    with torch.no_grad():
        p.add_(by)
        try:
            return sum(losses().values())
        finally:
            p.copy_(own)


def _is_of_the_loss(model: nn.Module, p: nn.Parameter, losses: Callable[[], dict[str, float]]) -> bool:
    """Return whether the loss depends on `p`, and the outputs of the model do not."""
    with _outputs(model) as before:
        plain = _at(p, 0.0, losses)
    with _outputs(model) as after:
        moved = _at(p, 1.0, losses)
    return (
        plain != moved
        and len(before) == len(after) > 0
        and all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(before, after, strict=True))
    )


@contextmanager
def _outputs(model: nn.Module) -> Iterator[list[Tensor]]:
    """Record the tensors that the model returns."""
    seen: list[Tensor] = []

    def note(_: nn.Module, __: tuple, output: Any) -> None:
        seen.extend(x.detach().clone() for x in tree_leaves(output) if isinstance(x, Tensor))

    with model.register_forward_hook(note):
        yield seen
