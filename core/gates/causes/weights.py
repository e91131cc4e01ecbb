"""Finds a step size that is out of all proportion in what a training did to the weights."""

from typing import Any

import torch
from torch import Tensor
from trainworthy.core.base.dtensor import local
from trainworthy.core.gates.causes.gradient import ENTRIES, STRIDE
from trainworthy.core.recipe.stage import Stage

STILL = 1e-3  # of their norm: less is no training
GREW, SHRANK = 10.0, 0.2  # times their norm
PACE = 0.25  # share of its fall that a loss which never slows down has in the last third of the steps; a straight line: 0.33
STEADY = 0.8  # of the fall in the quarter before
SEEN = 0.005  # of the first loss: a smaller fall says nothing


def entries(stage: Stage) -> Tensor:
    """Return some entries of the trained weights, on the host."""
    mine = [local(p).detach().flatten() for p in stage.parameters().values()]
    stride = max(STRIDE, sum(map(len, mine)) // ENTRIES)
    return torch.cat([torch.zeros(0), *(p[::stride].float().cpu() for p in mine)])


def explain_step_size(before: Tensor, after: Tensor, steps: int) -> str:
    """Return what `steps` steps did to the weights, if they hardly moved, grew or vanished. Empty: nothing of that kind."""
    size = before.norm().item()
    if not size or len(before) != len(after) or not torch.isfinite(after).all():
        return ""
    moved, now = (after - before).norm().item() / size, after.norm().item() / size
    if 0 < moved < STILL:
        return f"the rate is far too low: {steps} steps moved the weights by {moved:.2g} of their norm"
    if now > GREW:
        return f"the rate is far too high: {steps} steps made the weights {now:.3g} times as large"
    if now < SHRANK:
        return f"weight decay is far too strong for the rate: {steps} steps left {now:.0%} of the weights' norm"
    return ""


def explain_unslowed(found: dict[str, Any]) -> str:
    """Return a cause if the loss falls as fast at the end as on average. Then only the step size limits it: near a floor, a loss slows
    down."""
    losses = [found["initial"], *(loss for _, loss, _ in found["curve"])]
    third = len(losses) // 3
    whole, late = losses[0] - losses[-1], losses[-1 - third] - losses[-1]
    if third < 2 or losses != sorted(losses, reverse=True) or whole < SEEN * losses[0] or late < PACE * whole:
        return ""
    return (f"the rate is far too low for {found['steps']} steps: the loss never slows down, {late:.2g} of its fall by {whole:.2g} is in "
            "the last third")  # fmt: skip


def has_no_floor(found: dict[str, Any]) -> bool:
    """Return whether the loss fell as much in the last half of the steps as in the quarter before: near a floor it falls ever less. Some
    losses take thousands of steps although all answers are right (cumulative logits)."""
    curve, last = found["curve"], found["steps"]
    quarter, half, end = (next(loss for step, loss, _ in curve if step * parts >= last) for parts in (4, 2, 1))
    return half - end >= STEADY * (quarter - half) > 0 and half - end > SEEN * found["initial"]
