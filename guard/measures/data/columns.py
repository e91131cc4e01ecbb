"""Compares the columns of training and evaluation data: codes that were given anew, and scales that were fitted anew, on the
evaluation's own rows."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from trainworthy.guard.measures.data import missing_codes
from trainworthy.guard.measures.data.spaced import as_tensors, spaced
from trainworthy.guard.measures.data.stored_samples import arrays

MOST, WIDTH = 20_000, 64  # rows; entries of a row
TABLE = 4_000_000  # entries of a table that is read whole
CODES = (5, 200)
ROWS = 200
# Share of all squares, largest deviation by smallest: of columns that one mean and deviation scaled
LARGEST, UNLIKE = 0.4, 30
REFITTED = (
    "the scaler was fitted again on the evaluation's rows: fit it only on the training rows, then call transform()"
)
Columns = dict[tuple[int, int], Tensor]


def read(data: Any, limit: float) -> tuple[Columns, bool]:
    """Return the columns of a data set by entry and place, of up to `MOST` evenly spaced rows, and whether these are all; nothing if time
    runs out."""
    rows = spaced(data, MOST, limit, numbers)
    if len(rows) < ROWS or len({tuple((x.dtype, x.shape) for x in row) for row in rows}) > 1:
        return {}, False
    stacked = [torch.stack(x) for x in zip(*rows, strict=True)]
    return {(k, j): x[:, j] for k, x in enumerate(stacked) for j in range(min(WIDTH, x.shape[1]))}, len(rows) == len(
        data
    )


def numbers(sample: Any) -> list[Tensor] | None:
    """Return the entries of a row as vectors; None of pictures."""
    found = as_tensors(sample)
    return None if sum(x.numel() for x in found) > 4 * WIDTH else [x.flatten() for x in found]


def check(train: Any, others: list[Any], limit: float) -> tuple[str, str] | None:
    """Return what is wrong with the columns of one of the evaluations' data."""
    if any(of_series(train, data) for data in others):
        return (
            "the columns that the evaluation's data set holds have mean 0 and deviation 1 over its own rows, as those of training have over theirs",
            REFITTED,
        )
    mine, _ = read(train, limit)
    for entry in {k for k, _ in mine}:
        if measured := scaled_together([x for (k, _), x in mine.items() if k == entry]):
            return (
                f"the columns of entry {entry} {measured}",
                "one mean and one deviation scale all columns (axis=0 is missing), so that the largest drown the others",
            )
    for data in others if mine else ():
        theirs, whole = read(data, limit)
        if mine.keys() != theirs.keys():
            continue
        for key, column in theirs.items():
            anew = missing_codes.renumbered(mine[key], column) if whole else ""
            if measured := renumbered(mine[key], column) or anew:
                return (
                    f"column {key[1]} of entry {key[0]}: {measured}",
                    "the evaluation's codes were made anew, in another order: use one mapping for all rows, made from the training rows",
                )
        exact = [k for k, x in theirs.items() if all(v.is_floating_point() and standard(v) for v in (x, mine[k]))]
        same = len(exact) > 0 and torch.equal(mine[exact[0]], theirs[exact[0]])  # one data set in two loaders
        if whole and len(exact) >= 3 and not same:
            return (
                f"{len(exact)} columns of the evaluation have mean 0 and deviation 1 over its own rows, as those of training have over theirs",
                REFITTED,
            )
    return None


def of_series(train: Any, data: Any) -> bool:
    """Return whether both data sets hold a table (a series, of which windows are read) that was scaled by its own rows."""
    held = dict(tables(train))
    for name, theirs in tables(data):
        mine = held.get(name)
        if mine is None or theirs.shape[1] != mine.shape[1] or torch.equal(mine, theirs):
            continue
        if all(standard(c) for v in (mine, theirs) for c in v.unbind(1)):
            return True
    return False


def tables(data: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tables of numbers that a data set holds in memory, with their names."""
    for name, x in arrays(data):
        if x.ndim != 2 or not 0 < x.shape[1] <= WIDTH or x.shape[0] * x.shape[1] > TABLE or isinstance(x, np.memmap):
            continue
        held = x.detach().cpu() if isinstance(x, Tensor) else torch.tensor(x)
        if held.is_floating_point():
            yield name, held


def scaled_together(columns: list[Tensor]) -> str:
    """Return how columns of several units share one mean and one deviation; empty if they do not. Pixels and steps of a series do so, too,
    but none of them makes a large part of the variance of all."""
    if not 3 <= len(columns) < WIDTH or not columns[0].is_floating_point():
        return ""
    x = torch.stack(columns).double()
    mean, std, moving = x.mean(1), x.std(1), x.std(1) > 0
    if abs(float(x.mean())) > 0.05 or abs(float(x.std()) - 1) > 0.1 or moving.sum() < 3:
        return ""
    share, least, most = x.square().mean(1) / x.square().mean(1).sum(), float(std[moving].min()), float(std.max())
    far = float((mean.abs() > 2 * std)[moving].double().mean())
    if float(share.max()) < LARGEST or most < UNLIKE * least or far < 0.5:
        return ""
    return (
        f"have together mean {float(x.mean()):.2f} and deviation {float(x.std()):.2f}, alone deviations from {least:.2g} to {most:.2g}; column "
        f"{int(share.argmax())} makes {float(share.max()):.0%} of their squares"
    )


def renumbered(a: Tensor, b: Tensor) -> str:
    """Return how two columns differ that have the same shares and give them to other codes; empty if they do not."""
    if a.dtype != torch.int64 or b.dtype != torch.int64 or min(int(a.min()), int(b.min())) < 0:
        return ""
    size = max(int(a.max()), int(b.max())) + 1
    if size > 10 * CODES[1]:
        return ""
    p, q = (torch.bincount(x, minlength=size).double() for x in (a, b))
    known, unknown = int((p > 0).sum()), float(q[p == 0].sum())
    if not CODES[0] <= known <= min(CODES[1], len(b) // 20, len(a) // 20) or unknown > 0.02 * len(b):
        return ""
    p, q = p / p.sum(), q / q.sum()
    aligned, ranked = ((x - y).abs().sum() / 2 for x, y in ((p, q), (p.sort().values, q.sort().values)))
    if aligned < 0.3 or ranked > 0.15 * aligned:
        return ""
    return f"the evaluation has the same shares for other codes ({aligned:.0%} of its rows, {ranked:.0%} if codes are ranked by their share)"


def standard(x: Tensor) -> bool:
    """Return whether a column has mean 0 and deviation 1, to rounding, and is no constant."""
    x, n = x.double(), len(x)
    near = min(abs(float(x.std(unbiased=u)) - 1) for u in (True, False))
    return n >= ROWS and abs(float(x.mean())) < 1e-5 and near < 1e-5
