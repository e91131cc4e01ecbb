"""Finds a loss over indices (words, items, nodes) with a constant solution, for example a missing term for negative samples.

After the rehearsal, a model that returns its loss is called again with each argument's entries permuted. That destroys what the model has
learnt about pairs and positions. A loss that stays as low does not depend on the indices.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from trainworthy.core.base.modes import in_mode
from trainworthy.guard.measures.records import bare

STEPS, RICH = 40, 16  # least number of optimiser steps; of different indices in each argument
CLOSED, STILL = 0.1, 0.15  # largest fractions of the first losses: the final loss, and the loss with permuted entries
INDICES = (torch.int64, torch.int32)


class Collapse:
    """The last training call, with a whole batch, of a model that returns a loss."""

    def __init__(self) -> None:
        self.last: tuple[nn.Module, tuple, dict] | None = None
        self.size = 0

    def root(self, module: nn.Module, args: tuple, kwargs: dict, out: Any) -> None:
        """Record a call with gradients."""
        if isinstance(out, Tensor) and not out.dim() and out.requires_grad:
            size = sum(x.numel() for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
            if size >= self.size:  # an epoch's last batch may be short
                self.last, self.size = (module, args, kwargs), size


def check(seen: Any) -> tuple[tuple[str, str] | None, str]:
    """Return (fault or None, what was measured). It is a fault if the loss is as low with permuted entries."""
    last, losses = seen.collapse.last, seen.losses
    if last is None or seen.control is None or len(losses) < STEPS or min(losses[:3]) <= 0:
        return None, ""
    module, args, kwargs = last
    leaves, spec = tree_flatten((args, kwargs))
    given = [x for x in leaves if isinstance(x, Tensor) and x.dim()]
    if len(given) < 2 or any(x.dtype not in INDICES or len(x.unique()) < RICH for x in given):
        return None, ""
    start = sum(losses[:3]) / 3

    def call(inputs: list) -> float:
        changed, named = tree_unflatten(inputs, spec)
        with in_mode(inner, training=False), torch.no_grad():
            return float(inner(*changed, **named))

    inner = bare(module)
    with torch.random.fork_rng(devices=[]):
        mixed = [exchanged(x) if isinstance(x, Tensor) and x.dim() else x for x in leaves]
        own, other = call(leaves), call(mixed)
    measured = f"loss {start:.3g} -> {own:.3g}, {other:.3g} with the entries of every input exchanged"
    if not 0 <= own < CLOSED * start:
        return None, ""
    if not 0 <= other < STILL * start:
        return None, measured
    cause = (
        "the loss has a constant solution: no term pushes anything apart (the minus of the negative samples is missing, or no "
        "negatives are drawn)"
    )
    return (measured, cause), measured


def exchanged(x: Tensor) -> Tensor:
    """Return the entries in a random order."""
    return x.flatten()[torch.randperm(x.numel()).to(x.device)].view(x.shape)
