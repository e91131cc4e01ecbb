"""Finds rates of single steps that cannot be meant: negative ones, and those that irregular factors change again and again."""

import math
from itertools import pairwise

from trainworthy.core.base.verdict import Fault
from trainworthy.guard.measures.records import Pass

STEPS = 40
KINDS = 10  # different factors between neighbouring steps: a rule that adapts the rate has two or three
BOTH = 0.2  # of the steps raise the rate, and of them lower it
TURNS = 0.1  # of the steps go the other way than the one before: a warm-up and a cosine turn once
WIDE = 3.0  # variance of the logarithm of the rate, in variances of its change
ALONE = -0.3  # correlation of a change with the next one: -0.5 if each rate is a base rate times a factor of its own, 0 if factors add up
LEAST = 8  # updates of an epoch, at least
RISE = 3.0  # of the rate in a warm-up


def unlikely(rates: list[float]) -> Fault | None:
    """Return what is wrong with the rates of an optimiser's steps."""
    if rates and min(rates) < 0 < max(rates):
        at = next(i for i, r in enumerate(rates) if r < 0)
        return (
            f"the rate of step {at + 1} is {rates[at]:.3g}",
            "a negative rate raises the loss: a constant is missing in the schedule's formula, or it runs past its end",
        )
    if len(rates) < STEPS or min(rates) <= 0:
        return None
    logs = [math.log(r) for r in rates]
    changes = [b - a for a, b in pairwise(logs)]
    up, down = (sum(s * c > 1e-6 for c in changes) for s in (1, -1))
    turns = sum(a * b < 0 for a, b in pairwise(changes))
    if (
        min(up, down) < BOTH * len(changes)
        or turns < TURNS * len(changes)
        or len({round(c, 4) for c in changes}) < KINDS
    ):
        return None
    spread = variance(changes)
    mean = sum(changes) / len(changes)
    follow = sum((a - mean) * (b - mean) for a, b in pairwise(changes)) / (len(changes) * spread)
    if variance(logs) < WIDE * spread or not ALONE < follow < -ALONE:
        return None
    return (
        f"the rate goes up and down in {len(rates)} steps, from {rates[0]:.3g} to between {min(rates):.3g} and {max(rates):.3g}: each step "
        "multiplies the rate of the step before",
        "a factor of the step (its length) multiplies the rate, and the base rate is not put back after optimizer.step()",
    )


def restarted(passes: list[Pass], rates: list[list[float]]) -> Fault | None:
    """Return what is wrong with rates that rise in every epoch as they did in the one before: the count of a warm-up begins again. `rates`: those
    of each optimiser. A schedule with restarts falls within its cycle. The first update of an epoch may still use the last rate of the one before."""
    whole = [p for p in passes if p.training and p.ended and not p.was_cut and p.steps]
    if len(rates) != 1 or sum(p.steps for p in passes) != len(rates[0]):
        return None
    epochs = [rates[0][p.started + 1 : p.started + p.steps] for p in whole]
    first = epochs[0] if len(epochs) > 1 else []
    rises = len(first) >= LEAST and all(a < b for a, b in pairwise(first)) and first[-1] >= RISE * first[0] >= 0
    if not rises or any(later != first for later in epochs[1:]):
        return None
    return (
        f"in each of {len(epochs)} epochs the rate rises from {first[0]:.3g} to {first[-1]:.3g} by the same {len(first)} rates",
        "the schedule gets the number of the update within its epoch: count the updates of all epochs, or do not begin anew",
    )


def variance(values: list[float]) -> float:
    """Return the variance of some values."""
    mean = sum(values) / len(values)
    return sum((v - mean) ** 2 for v in values) / len(values)
