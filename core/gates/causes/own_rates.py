"""Causes of steps that a loop leaves out, of rates that it sets by itself, and of betas in the wrong order."""

import math
from collections.abc import Callable, Mapping
from itertools import pairwise

import torch

NEAR = 0.9  # fraction of the peak at the first step, from which on a rate has no warm-up
FEWEST = 10  # steps that show a schedule
END = 0.5  # fraction of the peak at its last step, at most
ALIKE = 0.1  # difference of two rates at one share of the run, in fractions of the peak
LONGER = 5.0  # largest ratio of the steps in Adam's first mean to those in its second; usual: 0.01 (0.9, 0.999) to 1 (0.95, 0.95)


def explain(rates: list[float], steps: int, losses: list[float], total: int, longer: Callable[[], list[float]]) -> str:
    """Return the cause of steps other than scheduled, or an empty string. `rates`: those of the steps, relative to their peak; `steps`: due
    ones; `losses`: of every update; `total`: steps of the full run; `longer()`: the rates of a run of twice the length."""
    bad = next((i for i, loss in enumerate(losses, 1) if not math.isfinite(loss)), 0)
    if bad:
        return (f"the loss is {losses[bad - 1]:g} at update {bad}, so its step was left out (a division by zero, a logarithm of 0, "
                "targets that grow with the net's own values, a rate that is too high)")  # fmt: skip
    return counted(rates, longer(), total) if falls(rates, steps) else ""


def fits(rates: list[float], steps: int, longer: Callable[[], list[float]]) -> bool:
    """Return whether the rates, relative to the configured peak, are a usual schedule of the loop's own: one step in each of `steps` iterations,
    the peak is reached, from there the rate falls to the last step, and in a run of twice the length it does the same more slowly."""

    def usual(some: list[float], n: int) -> bool:
        if len(some) != n or n < FEWEST or min(some) <= 0:
            return False
        top = max(range(n), key=some.__getitem__)
        fall = some[top:]
        ends = len(fall) > n // 2 and some[-1] <= END and some[-1] < some[-3]  # else it has ended before the run
        return NEAR <= some[top] <= 1.05 and ends and not any(b > a for a, b in pairwise(fall))

    if not usual(rates, steps) or not usual(slower := longer(), 2 * steps):
        return False
    pairs = [(rates[i], (slower[2 * i] + slower[2 * i + 1]) / 2) for i in range(rates.index(max(rates)) + 1, steps)]
    return all(abs(a - b) <= ALIKE for a, b in pairs)


def falls(rates: list[float], steps: int) -> bool:
    """Return whether the rates, relative to their peak, start there and fall, with one step in each of `steps` iterations."""
    return len(rates) == steps and rates[0] >= NEAR > rates[-1] and not any(b > a for a, b in pairwise(rates))


def counted(rates: list[float], longer: list[float], total: int) -> str:
    """Return the cause if a run of twice the length, with the rates `longer`, falls by the same count of steps; empty if not."""
    n = len(rates)
    if len(longer) < n or any(abs(a - b) > 1e-6 for a, b in zip(rates, longer, strict=False)):
        return ""
    return (f"train() sets the rate by a count of steps of its own: {rates[-1]:.3g} of the peak at step {n}, also in a run of twice the "
            f"length. The full run has {total:,} steps: are steps counted as epochs?")  # fmt: skip


def exchanged_betas(optimizers: Mapping[str, torch.optim.Optimizer]) -> tuple[str, str]:
    """Return (fault, cause) if a mean of the gradient is taken over far more steps than that of its square; both empty if not."""
    for name, optimizer in optimizers.items():
        for group in optimizer.param_groups:
            betas = group.get("betas", ())
            if len(betas) == 2 and 0 <= betas[0] < 1 and 1 - betas[1] > LONGER * (1 - betas[0]):
                first, second = (1 / (1 - b) for b in betas)
                return (f"optimiser '{name}' averages the gradient over {first:,.0f} steps and its square over {second:,.0f} (betas {betas})",
                        f"the two betas are exchanged: ({betas[1]:g}, {betas[0]:g}) averages the square over more steps")  # fmt: skip
    return "", ""
