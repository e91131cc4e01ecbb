"""Finds a calendar that goes with its series otherwise in an evaluation than in training: its hours are counted from another moment.

Columns of few values are a clock if together they always follow each other in one order (hour and weekday). How the series depends on the
clock is measured in training; in the evaluation it must not depend on a clock that is some steps ahead or behind.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from trainworthy.core.base.correlation import pearson
from trainworthy.core.base.verdict import Fault
from trainworthy.guard.measures.data.spaced import as_tensors, spaced

WINDOWS, LEAST = 600, 30  # windows that are read, needed
STEPS = 8  # of a window
VALUES, STATES = 64, 400  # of a column of a clock; of all its columns together (half-hours of a week: 336)
READ = 60_000  # steps of all windows
DEPENDS = 0.5  # correlation of the series with its mean at each state of the clock
CLEAR = 0.3  # difference of two such correlations
Rows = list[tuple[tuple[float, ...], ...]]


def series(sample: Any) -> Tensor | None:
    """Return the entries of a sample that have as many steps as its first series, side by side (steps, columns)."""
    found = [x.double().reshape(len(x), -1) for x in as_tensors(sample) if x.dim() in (1, 2) and len(x) >= STEPS]
    alike = [x for x in found if len(x) == len(found[0])]
    joined = torch.cat(alike, 1) if alike else torch.zeros(0, 0)
    return joined if 2 <= joined.shape[1] <= VALUES and len(joined) <= READ // LEAST else None


def windows(data: Any, limit: float) -> Tensor | None:
    """Return evenly spaced windows (windows, steps, columns)."""
    found = spaced(data, WINDOWS, limit, series)
    if len(found) < LEAST or len({x.shape for x in found}) > 1:
        return None
    return torch.stack(found[:: -(-len(found) * len(found[0]) // READ)])


def clock(x: Tensor) -> tuple[list[int], list[int]]:
    """Return the columns of few values that change within windows, the most changing first, and the columns of many values."""
    counts = [len(x[:, :, j].round(decimals=4).unique()) for j in range(x.shape[2])]
    moves = [float((x[:, 1:, j] != x[:, :-1, j]).double().mean()) for j in range(x.shape[2])]
    few = [j for j, n in enumerate(counts) if 2 <= n <= VALUES and moves[j] > 0]
    return sorted(few, key=lambda j: -moves[j]), [j for j, n in enumerate(counts) if n > 4 * VALUES]


def states(x: Tensor, columns: list[int]) -> Rows:
    """Return the state of the clock at each step of each window."""
    return [tuple(tuple(step) for step in one) for one in x[:, :, columns].round(decimals=3).add(0.0).tolist()]


def circle(rows: Rows) -> list[tuple[float, ...]] | None:
    """Return the states in their order, if each is always followed by the same one, and they make one circle."""
    following: dict[tuple[float, ...], tuple[float, ...]] = {}
    for row in rows:
        for a, b in pairwise(row):
            if following.setdefault(a, b) != b:
                return None
    if not 4 <= len(following) <= STATES:
        return None
    found = [next(iter(following))]
    while (state := following.get(found[-1])) not in (None, found[0]) and len(found) < len(following):
        found.append(state)
    return found if state == found[0] and len(found) == len(following) else None


def check(train: Any, others: list[Any], limit: float) -> Fault | None:
    """Return how far the evaluation's clock is from the one that its series goes by, and the cause."""
    mine = windows(train, limit) if others else None
    if mine is None:
        return None
    few, fast = clock(mine)
    for n in range(len(few), 0, -1) if fast else ():  # without the slowest (the month) until they are one circle
        slow = few[:n]
        rows = states(mine, slow)
        if (known := circle(rows)) is not None:
            break
    else:
        return None
    order = {state: i for i, state in enumerate(known)}
    at = torch.tensor([[order[s] for s in row] for row in rows])
    for data in others:
        theirs = windows(data, limit)
        if theirs is None or theirs.shape[1:] != mine.shape[1:]:
            continue
        there = [[order.get(s, -1) for s in row] for row in states(theirs, slow)]
        for j in fast:
            if min(map(min, there)) >= 0 and (
                found := late(mine[:, :, j], at, theirs[:, :, j], torch.tensor(there), len(order))
            ):
                return found
    return None


def late(mine: Tensor, at: Tensor, theirs: Tensor, there: Tensor, count: int) -> Fault | None:
    """Compare how a series goes with the states `at` in training and `there` in an evaluation, as it is and moved by some steps."""
    sums, seen = torch.zeros(count, dtype=mine.dtype), torch.zeros(count, dtype=mine.dtype)
    sums.index_add_(0, at.flatten(), mine.flatten())
    seen.index_add_(0, at.flatten(), torch.ones_like(mine.flatten()))
    usual = sums / seen.clamp_min(1)
    known = pearson(usual[at.flatten()], mine.flatten())
    if known < DEPENDS:
        return None
    moved = [pearson(usual[(there.flatten() + k) % count], theirs.flatten()) for k in range(count)]
    best = max(range(count), key=moved.__getitem__)
    if not best or moved[best] < 0.8 * known or moved[best] - moved[0] < CLEAR:
        return None
    steps = best if best <= count // 2 else best - count
    return (
        f"a series has a correlation of {known:.2f} with its mean at each of {count} states of the calendar in training, of {moved[0]:.2f} in the "
        f"evaluation, and there of {moved[best]:.2f} with the calendar of {abs(steps)} steps {'later' if steps > 0 else 'earlier'}",
        "the evaluation's calendar is counted from another moment than training's (from the beginning of its own part)",
    )
