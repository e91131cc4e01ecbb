"""Finds rates of single steps that cannot be meant: negative ones, and those that irregular factors change again and again."""

import math
from itertools import pairwise

from trainworthy.core.base.verdict import Fault

STEPS = 40
KINDS = 10  # different factors between neighbouring steps: a rule that adapts the rate has two or three
BOTH = 0.2  # of the steps raise the rate, and of them lower it
TURNS = 0.1  # of the steps go the other way than the one before: a warm-up and a cosine turn once
WIDE = 3.0  # variance of the logarithm of the rate, in variances of its change
ALONE = -0.3  # correlation of a change with the next one: -0.5 if each rate is a base rate times a factor of its own, 0 if factors add up


def fault(rates: list[float]) -> Fault | None:
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
    if min(up, down) < BOTH * len(changes) or turns < TURNS * len(changes) or len({round(c, 4) for c in changes}) < KINDS:
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


def variance(values: list[float]) -> float:
    """Return the variance of some values."""
    mean = sum(values) / len(values)
    return sum((v - mean) ** 2 for v in values) / len(values)
