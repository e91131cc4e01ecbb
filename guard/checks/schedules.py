"""The check of schedulers: what they are stepped by, and where that leads."""

import ast
import gc
from collections.abc import Callable
from typing import Any

from trainworthy.core.base.names import more_is_better
from trainworthy.guard.checks.invariants import stepped
from trainworthy.guard.checks.results import finding, skip
from trainworthy.guard.measures.rates import levelled, restarted, risen, spent, squared, unlikely
from trainworthy.guard.measures.records import CLOSE
from trainworthy.guard.observing.observer import Observer
from trainworthy.guard.source.scheduler_calls import calls_of_step, counts, length_argument, options_of

TURN = 0.75  # of an epoch: a cosine that is over before was not made for steps
RARE, EPOCHS = 50, 45  # updates between steps of a scheduler; more than the epochs that people warm up
AHEAD = 20_000  # optimiser steps that a schedule is foreseen


def schedule(seen: Observer) -> dict:
    """Check the pace of every scheduler, and predict it to the end of the first epoch by stepping it on."""
    rates = [g.rates for g in stepped(seen)]
    if fault := next((f for r in rates if (f := unlikely(r))), None) or restarted(seen.passes, rates):
        return finding("schedule", *fault)
    if fault := next((f for g in stepped(seen) if (f := levelled(g))), None):
        return finding("schedule", *fault)
    if not seen.schedulers:
        return by_hand(seen)
    if fault := contrary(seen.plateaus):
        return finding("schedule", *fault)
    if fault := twice(seen):
        return finding("schedule", *fault)
    train = [p for p in seen.passes if p.training]
    length = max((p.length or 0 for p in train[:1]), default=0)
    measured: list[str] = []
    for one in seen.schedulers:
        if fault := squared(one):
            return finding("schedule", *fault)
        if one.placed:
            measured.append(f"{type(one.it).__name__}: its step() is given the epoch, {len(one.at)} times")
            continue
        found = uncalled(seen, one, train) or pace(seen, one, train, length)
        if isinstance(found, dict):
            return found
        measured.append(found)
    return finding("schedule", "; ".join(measured))


def twice(seen: Observer) -> tuple[str, str] | None:
    """Find two equal schedulers of one optimiser, stepped alike, beside an optimiser that has none: the second one was meant for it."""
    bare = [g for g in stepped(seen) if not any(owner(seen, one) is g for one in seen.schedulers)]
    every = [one for one in seen.schedulers if not child(seen, one.it)] if bare else []
    for i, one in enumerate(every):
        for other in every[:i]:
            alike = (
                type(one.it) is type(other.it) and abs(len(one.at) - len(other.at)) <= 1 and one.place != other.place
            )
            if alike and one.optimizer is other.optimizer and settings(one.it) == settings(other.it):
                kind, name = type(one.it).__name__, type(bare[0].ref()).__name__
                return (
                    f"two {kind} with equal settings (lines {other.place[1]} and {one.place[1]}) set the rate of one optimiser, and another "
                    f"{name} has none",
                    "the second scheduler was built on the first one's optimiser: the one falls twice as fast and the other keeps its rate",
                )
    return None


def settings(scheduler: Any) -> dict[str, Any]:
    """Return what a scheduler was built with, without its counts."""
    return {k: v for k, v in scheduler.state_dict().items() if k[0] != "_" and k not in ("last_epoch", "base_lrs")}


def by_hand(seen: Observer) -> dict:
    """A rate that the loop sets itself: follow the function of the script that computes it to the end of the run."""
    rates = max((g.rates for g in stepped(seen)), key=len, default=[])
    if len(rates) < 16 or len(set(rates)) < 2:
        return skip("schedule", "no scheduler of torch.optim, and the rate does not change")
    for function in seen.rates_by_hand:
        ahead = computed(function, rates, 4 * max(seen.planned, len(rates)))
        if not ahead:
            continue
        name, end = function.__name__, seen.planned
        measured = f"{name}(): the rate of each of {len(rates)} steps"
        if end < 2 * CLOSE or len(ahead) < end:
            return finding("schedule", measured)
        peak, rest = max(ahead[:end]), ahead[:end]
        if peak < 0.3 * max(ahead):
            cause = "the warm-up is longer than the run: it was set for a longer one, or counts other steps"
            measured += f"; within the run's {end:,} steps it reaches {peak:.3g}, later {max(ahead):.3g}"
            return finding("schedule", measured, cause)
        floor = next(i for i, r in enumerate(rest) if max(rest[i:]) - min(rest[i:]) <= 1e-6 * peak)
        falling = rest[rest.index(peak) : floor]
        smooth = len(set(falling)) > max(3, 0.8 * len(falling))
        if (floor < 0.5 * end and rest[-1] < 0.2 * peak and smooth) or (floor < 0.15 * end and rest[-1] < 0.02 * peak):
            cause = "the schedule counts micro-batches, or its length is that of another run, so most of the training uses the lowest rate"
            measured += f"; it has fallen to {rest[-1]:.3g} after {floor:,} of the run's {end:,} steps, from {peak:.3g}"
            return finding("schedule", measured, cause)
        return finding("schedule", f"{measured}; {rest[-1]:.3g} at the end of the run's {end:,} steps")
    return skip(
        "schedule", "no scheduler of torch.optim, and no function of the script that returns the rate of a step"
    )


def computed(function: Callable, rates: list[float], steps: int) -> list[float]:
    """Return the rates of a whole run if a function of the step's number gives those that were used; else nothing."""
    try:
        for first in (0, 1):
            found = [float(function(first + i)) for i in range(len(rates))]
            if all(abs(a - b) <= 1e-6 * max(abs(b), 1e-12) for a, b in zip(found, rates, strict=True)):
                return [float(function(first + i)) for i in range(min(steps, 100_000))]
    except Exception:
        return []
    return []


def uncalled(seen: Observer, one: Any, train: list) -> dict | None:
    """A scheduler that is never stepped, or more often than there are updates."""
    several, mine = len(train) > 1, owner(seen, one)
    kind = type(one.it).__name__
    constant = not one.at and several and mine is not None and len(set(mine.rates)) <= 1
    constant = constant and not child(seen, one.it) and not calls_of_step(*one.place)
    if constant and len(train) > 2:
        return finding(
            "schedule", f"{kind} was never stepped in {len(train) - 1} epochs", "scheduler.step() is missing"
        )
    if mine is not None and mine.steps >= 8 and len(one.at) >= 1.8 * mine.steps * by_process(seen, one.it):
        return finding(
            "schedule",
            f"{kind} is stepped {len(one.at) / mine.steps:.1f} times per optimiser step",
            "scheduler.step() is called for every micro-batch or process: it ends that much before the training",
        )
    pairs = list(zip(one.at, one.at[1:], strict=False))
    idle = [b for a, b in pairs if 0 < a[0] == b[0] and b[1] >= a[1] + 2]
    if idle and len(idle) >= 0.4 * len({steps for steps, _ in one.at if steps}):
        return finding(
            "schedule",
            f"{kind} is stepped again after an evaluation, without an optimiser step in between",
            "scheduler.step() is called after the training and after the validation of an epoch: it ends too soon",
        )
    if not one.at and several and mine is not None and not child(seen, one.it):
        return held_low(seen, one, mine, constant)
    return None


def held_low(seen: Observer, one: Any, mine: Any, constant: bool) -> dict | None:
    """A scheduler that lowers the rate when it is built (OneCycleLR to 1/25 of its peak) and is never stepped. `constant`: the rate never
    changes, and no line of the script steps it. A step under an option that is off will not come, and neither does one whose rate the loop
    sets itself."""
    kind, first = type(one.it).__name__, mine.rates[0]
    steps = next((i for i, rate in enumerate(mine.rates) if rate != first), len(mine.rates))
    low = first / (peak_of(one) or 1.0)
    if steps < 16 or not 0 <= low < 0.2:
        return None
    measured = f"{kind} was never stepped in {mine.steps} updates: the rate stays at {low:.2g} of its base"
    if constant:
        return finding("schedule", measured, "scheduler.step() is missing")
    if max(one.it.get_last_lr()) != first or any(s.at for s in seen.schedulers if s.optimizer is one.optimizer):
        return None  # a warm-up of another scheduler, or of the loop
    if (later := max(mine.rates)) >= 3 * first and mine.rates[steps] >= 3 * first:
        return finding(
            "schedule",
            f"{kind} was never stepped in {mine.steps} updates: {steps} of them used the rate {first:.3g} that it begins with, "
            f"then the loop set {later:.3g}",
            f"{kind} lowers the rate when it is built: build it only where it is stepped, or set the rate before the first step, too",
        )
    options = options_of(*one.place) if steps == len(mine.rates) else []
    if options:
        return finding(
            "schedule",
            f"{measured}. Its step() is called only if {' or '.join(options[:3])}",
            f"{kind} lowers the rate when it is built: build it under the same condition",
        )
    return None


def owner(seen: Observer, one: Any) -> Any:
    """The optimiser whose rate a scheduler sets, as far as it stepped."""
    return next((g for g in stepped(seen) if g.ref() is one.optimizer or g.ref() is inner(one.optimizer)), None)


def pace(seen: Observer, one: Any, train: list, length: int) -> dict | str:
    """A scheduler whose length does not fit what it is stepped by; else its pace in words."""
    several, mine, kind = len(train) > 1, owner(seen, one), type(one.it).__name__
    per_batch = len(one.at) >= 3 and train and len(one.at) >= 0.5 * seen.steps
    total = getattr(one.it, "total_steps", None) or getattr(one.it, "T_max", None)
    if not per_batch:
        slow = several and length >= 20 and len(one.at) in (len(train), len(train) - 1)
        times = (
            total // length if isinstance(total, int) and length and total % length == 0 and total != seen.epochs else 0
        )
        given = length_argument(one)
        chance = isinstance(given, ast.Constant) and total != seen.epochs * length
        if slow and not chance and (times >= 2 or (times == 1 and counts(given))):
            return finding(
                "schedule",
                f"{kind} of {total} steps is stepped once an epoch of {length} updates",
                "it was made for one step per batch",
            )
        warming = None
        if mine is not None:
            warming = warm_up_of_steps(seen, one, mine, length) if slow else slow_warm_up(seen, one, mine)
        return zeroed(one, mine) or warming or f"{kind}: {len(one.at)} steps in {seen.steps} updates"
    rates = mine.rates if mine is not None else []
    # Else the rehearsal's time was over in the first epoch
    whole = not train[0].was_cut and (train[0].ended or several)
    updates = train[0].steps if whole else round(length * train[0].steps / max(1, train[0].got))
    ahead: list[float] = []
    if updates and seen.control is not None:
        ahead = rates + foresee(one, len(one.at) / max(1, seen.steps))
    end = horizon(seen, updates)
    if end >= max(16, seen.steps) and len(ahead) > 4 * end and max(ahead[:end]) < 0.3 * max(ahead):
        return finding(
            "schedule",
            f"{kind}: within the run's {end:,} updates the rate reaches {max(ahead[:end]):.3g}, its peak "
            f"{max(ahead):.3g} would come after {ahead.index(max(ahead)):,}",
            "the warm-up is longer than the run: it was set for a longer one, or counts samples and not batches",
        )
    if found := (spent(one, ahead[:end]) or risen(one, ahead[:end])) if len(ahead) >= end >= 16 else None:
        return finding("schedule", *found)
    if kind == "CosineAnnealingLR" and several and total <= TURN * updates and not child(seen, one.it):
        return finding(
            "schedule",
            f"{kind} with T_max={total} is stepped at every batch: within the first epoch of {updates} updates it has reached its lowest rate "
            "and rises again",
            "T_max counts epochs: scheduler.step() belongs after the loop over batches, or T_max must be counted in batches",
        )
    rates = ahead[: max(len(rates), int(1.5 * updates))] if several and ahead else rates
    peak, after = max(rates[:updates], default=0.0), rates[updates - 1 : int(1.5 * updates)]
    if several and peak > 0 and after and max(after) < 0.1 * peak:
        return finding(
            "schedule",
            f"{kind} is stepped at every batch: its rate falls from {peak:.3g} to {after[0]:.3g} "
            f"within the first epoch of {length} batches, and more epochs follow",
            "scheduler.step() belongs after the loop over batches, or its lengths must be counted in batches",
        )
    return f"{kind}: one step per update, rate {after[0] if after else rates[-1] if rates else 0:.3g} after an epoch"


def zeroed(one: Any, mine: Any) -> dict | None:
    """Find a scheduler that multiplies the rate by zero: it stands for no schedule, and ends the training."""
    if mine is None or getattr(one.it, "gamma", None) != 0:
        return None
    zeros = next((i for i, rate in enumerate(reversed(mine.rates)) if rate), len(mine.rates))
    if zeros in (0, len(mine.rates)) or zeros < min(16, len(mine.rates) // 4):
        return None
    return finding(
        "schedule",
        f"{type(one.it).__name__} with gamma=0: the rate is 0 in the last {zeros} of {len(mine.rates)} updates",
        "gamma=1 keeps the rate; gamma=0 sets it to zero, and nothing is learnt from then on",
    )


def warm_up_of_steps(seen: Observer, one: Any, mine: Any, length: int) -> dict | None:
    """Find a scheduler that is stepped once an epoch of `length` updates, and whose rate rises for so many steps that the run ends long before
    its peak. A warm-up of epochs is shorter than that, also where a trial run has few of them."""
    left = seen.epochs - len(one.at)
    if seen.control is None or seen.epochs < 2 or left < 0:
        return None
    ahead = foresee(one, 1)
    reached, peak = max(*mine.rates, *ahead[:left]), max(ahead, default=0.0)
    after = len(one.at) + ahead.index(peak) + 1 if ahead else 0
    if reached >= 0.3 * peak or after < max(4 * seen.epochs, length // 4, 16):
        return None
    return finding(
        "schedule",
        f"{type(one.it).__name__} is stepped once an epoch of {length} updates: in the run's {seen.epochs} epochs the rate reaches {reached:.3g}; "
        f"its peak {peak:.3g} comes after {after:,} steps of the scheduler",
        "its lengths count batches: scheduler.step() belongs into the loop over batches",
    )


def slow_warm_up(seen: Observer, one: Any, mine: Any) -> dict | None:
    """Find a scheduler that is stepped once in many updates, and whose rate begins below a tenth and rises for more steps than people warm up
    epochs. Where a loader feeds the loop, its epochs tell more."""
    if seen.control is None or seen.passes or not 1 <= len(one.at) <= mine.steps / RARE:
        return None
    ahead, most = foresee(one, 1), max(mine.rates)
    peak = max(ahead, default=0.0)
    if not ahead or most > 0.1 * peak or ahead.index(peak) < EPOCHS:
        return None
    return finding(
        "schedule",
        f"{type(one.it).__name__} is stepped {len(one.at)} times in {mine.steps} updates: their rates are at most {most / peak:.2g} of its "
        f"peak, which comes after {ahead.index(peak) + 1:,} more steps of the scheduler",
        "its lengths count updates: scheduler.step() belongs behind each optimizer.step()",
    )


def contrary(plateaus: dict[str, str]) -> tuple[str, str] | None:
    """Find a ReduceLROnPlateau that waits for a loss to rise or for an accuracy to fall, by the name of what it is given."""
    for line, mode in plateaus.items():
        given = line.partition(".step(")[2]
        better = more_is_better(given)
        low = better is False
        if better is not None and "-" not in given and mode == ("max" if low else "min"):
            return (
                f"ReduceLROnPlateau waits for a {'maximum' if low else 'minimum'} of what {line} gives it",
                f"mode='{'min' if low else 'max'}' is meant: the rate is cut while the {'loss' if low else 'score'} improves",
            )
    return None


def peak_of(one: Any) -> float:
    """Return the highest rate that a scheduler is built for, as far as its optimiser holds it."""
    groups = getattr(one.optimizer, "param_groups", [])
    return max((max(float(g.get(k) or 0) for k in ("initial_lr", "max_lr")) for g in groups), default=0.0)


def child(seen: Observer, scheduler: Any) -> bool:
    """Return whether another scheduler (SequentialLR, ChainedScheduler) steps this one."""
    return any(scheduler in (getattr(s.it, "_schedulers", None) or ()) for s in seen.schedulers)


def horizon(seen: Observer, updates: int) -> int:
    """Return the updates of the whole run: by a trainer's own count, or by the script's number of epochs; 0 if unknown."""
    for o in gc.get_objects():
        if type(o).__name__ == "TrainerState" and isinstance(getattr(o, "max_steps", None), int) and o.max_steps > 0:
            return o.max_steps
    return seen.epochs * updates


def by_process(seen: Observer, scheduler: Any) -> int:
    """Return how often Accelerate steps a prepared scheduler per update: once per process, by its own convention."""
    if seen.ranks == 1:
        return 1
    wrapped = [o for o in gc.get_objects() if type(o).__name__ == "AcceleratedScheduler"]
    return seen.ranks if any(getattr(o, "scheduler", None) is scheduler for o in wrapped) else 1


def inner(optimizer: Any) -> Any:
    """Return the torch optimiser inside a library's wrapper (Accelerate's)."""
    return getattr(optimizer, "optimizer", None)


def foresee(one: Any, pace: float) -> list[float]:
    """Return the rates of the next `AHEAD` optimiser steps, with `pace` scheduler steps each. The script has ended, so
    nothing is restored."""
    import warnings

    it, optimizer, done = one.it, one.optimizer, 0.0
    if optimizer is None or type(it).__name__ == "ReduceLROnPlateau":
        return []
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(AHEAD):
            done += pace
            try:
                while done >= 1:
                    it.step()
                    done -= 1
                rates.append(max(float(g["lr"]) for g in optimizer.param_groups))
            except Exception:  # past its end it raises, or its formula has no real value: a root of a negative number
                break
    return rates
