"""Finds rates that cannot be meant: negative ones, those that irregular factors change again and again, the square of a base rate, a rate that
is gone before the run's middle or that rises again."""

import contextlib
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from trainworthy.core.base.verdict import Fault
from trainworthy.guard.measures.records import Group, Pass

STEPS = 40
KINDS = 10  # different factors between neighbouring steps: a rule that adapts the rate has two or three
BOTH = 0.2  # of the steps raise the rate, and of them lower it
TURNS = 0.1  # of the steps go the other way than the one before: a warm-up and a cosine turn once
WIDE = 3.0  # variance of the logarithm of the rate, in variances of its change
ALONE = -0.3  # correlation of a change with the next one: -0.5 if each rate is a base rate times a factor of its own, 0 if factors add up
SHORT = 3  # updates of an epoch that was cut
LEAST = 8  # updates of an epoch, at least
RISE = 3.0  # of the rate in a warm-up
SMALL, TINY = 0.05, 3e-5  # factors and base rates that are rates; their product, below all usual ones
FACTORS = 1000  # of a LambdaLR, from its first step on


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
    if min(up, down) < BOTH * len(changes) or turns < TURNS * len(changes):
        return None
    if len({round(c, 4) for c in changes}) < KINDS:
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


def levelled(group: Group) -> Fault | None:
    """Return that parameter groups that were built with several rates have one from the first step on: a loop that sets the rate by itself gives
    all groups the same. A group that was built with a rate of 0 waits for its own."""
    if not group.levelled or group.levelled < group.steps or 0 in group.built:
        return None
    return (
        f"the optimiser was built with rates of {', '.join(f'{r:.3g}' for r in dict.fromkeys(group.built))} for its groups, and all of them train "
        f"with {group.rates[0]:.3g}",
        "the loop writes one rate into every param_group, or OneCycleLR and CyclicLR get one number for all: each group has a rate of its own",
    )


def restarted(passes: list[Pass], rates: list[list[float]]) -> Fault | None:
    """Return what is wrong with rates that rise in every epoch as they did in the one before: the count of a warm-up begins again. `rates`: those
    of each optimiser. A schedule with restarts falls within its cycle. The first update of an epoch may still use the last rate of the one before."""
    every = [p for p in passes if p.training and p.ended and p.steps > SHORT]
    if len(rates) != 1 or sum(p.steps for p in passes) != len(rates[0]):
        return None
    epochs = [rates[0][p.started + 1 : p.started + p.steps] for p in every]  # some may have been cut
    first = max(epochs, key=len, default=[])
    rises = len(first) >= LEAST and all(a < b for a, b in pairwise(first)) and first[-1] >= RISE * first[0] >= 0
    if (
        not rises
        or sum(map(len, epochs)) < 2 * LEAST
        or len(epochs) < 2
        or any(one != first[: len(one)] for one in epochs)
    ):
        return None
    return (
        f"in each of {len(epochs)} epochs the rate rises by the same rates, from {first[0]:.3g} to {first[-1]:.3g} after {len(first)} updates",
        "the schedule gets the number of the update within its epoch: count the updates of all epochs, or do not begin anew",
    )


def variance(values: list[float]) -> float:
    """Return the variance of some values."""
    mean = sum(values) / len(values)
    return sum((v - mean) ** 2 for v in values) / len(values)


def squared(one: Any) -> Fault | None:
    """Find a LambdaLR whose function returns rates: its largest factor is the base rate itself, so the rate is never above its square."""
    factors = getattr(one.it, "lr_lambdas", None)
    base = max(getattr(one.it, "base_lrs", [1.0]))
    if type(one.it).__name__ != "LambdaLR" or not factors or not 0 < base < 0.3:
        return None
    try:
        rows = [[float(f(k)) for k in range(FACTORS)] for f in factors]
    except Exception:
        return None
    if (at := next((k for row in rows if (k := falls_to(row, base))), 0)) and len(rows) == 1:
        before, after = rows[0][at - 1], rows[0][at]
        return (
            f"the factor of LambdaLR rises to {before:.3g} and is {after:.3g} at the next step, as much times the base rate {base:.3g}: the rate "
            f"falls to {base * after:.2g}",
            "after the warm-up the function returns a rate where a factor of the base rate is meant",
        )
    peak = max(map(max, rows))
    if abs(peak - base) > 1e-6 * base:
        return product(base, max(map(highest, factors)))
    return (
        f"the largest factor of LambdaLR is {peak:.3g}, the base rate itself: the rate is never above its square, {base * peak:.2g}",
        "the function returns a rate where a factor of the base rate is meant (1 at its peak)",
    )


def product(base: float, peak: float) -> Fault | None:
    """Find a factor that is a rate in all of a long run, where the base rate is one, too: the schedule of Vaswani et al. (2017) gives the rate
    itself, for a base of 1."""
    if not 0 < peak < SMALL or base >= SMALL or base * peak >= TINY:
        return None
    return (
        f"the base rate is {base:.3g}, and the largest factor of LambdaLR {peak:.3g}: the rate is never above {base * peak:.2g}",
        "the function returns the rate itself, which is multiplied by the optimiser's: build the optimiser with lr=1",
    )


def highest(factor: Callable[[int], float]) -> float:
    """Return the largest factor within a million steps: of the first ones, then of steps that are further and further apart."""
    steps = [*range(FACTORS), *(int(FACTORS * 1.05**k) for k in range(142))]
    found = 1.0
    with contextlib.suppress(Exception):  # behind its end
        found = max(float(factor(k)) for k in steps)
    return found


def falls_to(factors: list[float], base: float) -> int:
    """Return the step at which factors that were rising to about 1 are multiplied by the base rate; 0: there is none. Steps of a decay by
    tenths come after equal factors."""
    for k in range(2, len(factors) - 1):
        before, at, after = factors[k - 1 : k + 2]
        rising = 0.5 < before <= 1.001 and before > factors[k - 2]
        if rising and abs(at / base - 1) < 0.05 and abs(at / base - before) < 0.1 and 0 < after <= 1.001 * at:
            return k
    return 0


def spent(one: Any, rates: list[float]) -> Fault | None:
    """Find a rate that is gone before the middle of the run, and stays so: below a hundredth of its peak where it falls by a constant factor
    now and then (a short run has few such steps), else below a thousandth. `rates`: those of the whole run."""
    kind, peak = type(one.it).__name__, max(rates, default=0.0)
    low, words = (0.01, "hundredth") if kind in ("StepLR", "MultiStepLR") else (0.001, "thousandth")
    gone = max((i + 1 for i, rate in enumerate(rates) if rate >= low * peak), default=0)
    if not peak or gone >= 0.5 * len(rates):
        return None
    return (
        f"{kind} is stepped at every batch: after {gone:,} of the run's {len(rates):,} updates its rate is {rates[gone]:.2g}, below a {words} of "
        f"its peak {peak:.3g}, and stays there",
        "its lengths count epochs: scheduler.step() belongs after the loop over batches, or its lengths must be counted in batches",
    )


def risen(one: Any, rates: list[float]) -> Fault | None:
    """Find a smooth factor (LambdaLR, as transformers' cosine is) that falls to nothing before the run's end, and then rises as slowly as it fell:
    it was made for fewer steps. Restarts jump. `rates`: those of the whole run."""
    peak = max(rates, default=0.0)
    if type(one.it).__name__ != "LambdaLR" or not peak:
        return None
    top = rates.index(peak)
    floor = next((i for i in range(top, len(rates)) if rates[i] < 1e-3 * peak), len(rates))
    after = rates[floor:]
    steepest = max((b - a for a, b in pairwise(after)), default=0.0)
    if not floor or len(after) < 8 or max(after) < 0.2 * peak or steepest > 0.2 * peak:
        return None
    return (
        f"{type(one.it).__name__}: within the run's {len(rates):,} updates the rate falls from {peak:.3g} to {rates[floor]:.2g} after {floor:,}, and "
        f"rises again to {max(after):.3g}",
        "the schedule was made for fewer steps than the run has (of one epoch, or of one process): give it the steps of the whole run",
    )
