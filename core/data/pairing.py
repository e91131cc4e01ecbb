"""Finds targets that belong to another row: a column that moved by a row, masks that were numbered again.

Rows are compared with their neighbours. A text answers the input with which it shares rare words; a mask fits the picture
whose edges lie under its outlines. No model is trained.
"""

import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from trainworthy.core.data.contents import compared_fields
from trainworthy.core.recipe.stage import Data

ROWS = 600  # texts that are compared, in BLOCKS runs of neighbouring rows
PICTURES = 256
BLOCKS = 4
LEAST = 24  # pairs in a run of rows; with fewer there is no verdict
TEXT_LAGS = (1, -1, 2, -2)
MASK_LAGS = tuple(k * sign for k in range(1, 10) for sign in (1, -1))  # a picture may be several windows
SURE, ALSO = 5.0, 3.0  # standard errors by which the other row must fit better in one run of rows, and in a second one
SIDE = 128  # pixels to which pictures and masks are pooled
UNRELATED = (
    0.5  # the own row's fit must differ from that of a distant row by less than this fraction of the better row's
)
FAR = 11  # times the lag


@dataclass
class Moved:
    """A run of rows whose targets fit the inputs of other rows."""

    target: str
    lag: int
    """The input of row `i + lag` fits the target of row `i`."""
    first: int
    """First row of the run."""
    pairs: int
    sure: float
    """Standard errors by which it fits better."""

    def words(self) -> str:
        rows = f"{abs(self.lag)} row{'s' * (abs(self.lag) > 1)} {'later' if self.lag > 0 else 'earlier'}"
        return (f"from row {self.first} on, the '{self.target}' of a row fits the input {rows} and not its own "
                f"({self.pairs} rows, {self.sure:.0f} standard errors)")  # fmt: skip


Fit = Callable[[int, int], float | None]
"""(i, j) -> how well the target of row i fits the input of row j; None if they cannot be compared."""


class Comparison(NamedTuple):
    """How rows of a data set are compared with their neighbours."""

    target: str
    """Name of the field that may have moved."""
    most: int
    """Largest number of rows that are read."""
    lags: tuple[int, ...]
    prepare: Callable[[list[dict[str, Any]]], Fit]


def moved(data: Data, compared: Comparison | None = None) -> Moved | None:
    """Return the clearest run of rows whose targets belong to other rows, or None. Without `compared`, texts and masks are compared."""
    if len(data) < 2 * LEAST or (found := compared or _kind(data)) is None:
        return None
    target, most, lags, prepare = found
    size = min(most, len(data)) // BLOCKS
    starts = sorted({round(k * (len(data) - size) / (BLOCKS - 1)) for k in range(BLOCKS)})
    runs = []
    for start in starts:
        rows = [data.get(i, None) for i in range(start, start + size)]
        fit = prepare(rows)
        runs += [one for lag in lags if (one := _run(fit, target, start, size, lag)) is not None]
    for one in sorted((r for r in runs if r.sure > SURE), key=lambda r: -r.sure):
        same = [r for r in runs if r.lag == one.lag]
        if len(same) > 1:
            return min(same, key=lambda r: r.first)
    return None


def _run(fit: Fit, target: str, start: int, size: int, lag: int) -> Moved | None:
    places = [i for i in range(size) if 0 <= i + lag < size]
    rows = [(fit(i, i), fit(i, i + lag), fit(i, (i + FAR * lag) % size)) for i in places]
    known = torch.tensor([r for r in rows if None not in r], dtype=torch.float64).reshape(-1, 3)
    if len(known) < LEAST:
        return None
    own, other, far = known.unbind(1)
    sure = standard_errors(other - own)
    if sure < ALSO or abs((own - far).mean()) > UNRELATED * (other - far).mean():
        return None
    return Moved(target, lag, start, len(known), sure)


def standard_errors(gain: Tensor) -> float:
    """Return how many standard errors the mean of `gain` (N,) is above zero."""
    return (gain.mean() / (gain.std() / math.sqrt(len(gain))).clamp_min(1e-12)).item()


def _kind(data: Data) -> Comparison | None:
    """Return the comparison of data whose target can be compared with its input without knowledge of the domain."""
    first = data.get(0, None)
    targets = [k for k, f in data.fields.items() if f.role == "target"]
    inputs = [k for k in compared_fields(data) if k in first]
    read = [k for k in inputs if isinstance(first[k], str)]
    if read == inputs and (text_field := next((k for k in targets if isinstance(first[k], str)), "")):
        return Comparison(text_field, ROWS, TEXT_LAGS, lambda rows: _texts(rows, read, text_field))
    pictures = [
        k for k in inputs if isinstance(first[k], Tensor) and first[k].ndim == 3 and first[k].is_floating_point()
    ]
    for mask in (k for k in targets if isinstance(first[k], Tensor) and first[k].ndim == 2):
        for picture in pictures:
            if first[picture].shape[-2:] == first[mask].shape:
                return Comparison(mask, PICTURES, MASK_LAGS, partial(_masks, picture=picture, mask=mask))
    return None


# ------------------------------------------------------------------------------------------------------------------ texts
def words(text: str) -> set[str]:
    """Return the words of a text, parts of names (`snake_case`, `camelCase`) as words of their own."""
    return set(re.findall(r"[^\W\d_]{3,}|\d{2,}", re.sub(r"([a-z])([A-Z])", r"\1 \2", text).casefold()))


def _texts(rows: list[dict[str, Any]], read: list[str], target: str) -> Fit:
    inputs = ["\n".join(row[k] for k in read) for row in rows]
    outputs = [row[target] for row in rows]
    sets = [words(text) for text in inputs], [words(text) for text in outputs]
    seen = Counter(w for side in sets for one in side for w in one)
    rare = {w: math.log(2 * len(rows) / n) for w, n in seen.items()}

    def fit(i: int, j: int) -> float | None:
        mine, there = sets[1][i], sets[0][j]
        if not mine or not there:
            return None
        repeated = inputs[i] == inputs[j] or outputs[i] == outputs[j]
        if i != j and (repeated or outputs[i].casefold() in inputs[j].casefold()):
            return None  # the next turn of a conversation quotes this one
        weight = sum(rare[w] for w in mine)
        return sum(rare[w] for w in mine & there) / weight if weight else None

    return fit


# ------------------------------------------------------------------------------------------------------------------ masks
def _masks(rows: list[dict[str, Any]], picture: str, mask: str) -> Fit:
    slopes, outlines = [], []
    for row in rows:
        slope = steps(row[picture].float()).amax(0, keepdim=True)  # (1, H, W)
        edge = (steps(row[mask][None].float()) > 0).float()
        size = (min(slope.shape[-2], SIDE), min(slope.shape[-1], SIDE))
        slopes.append(F.adaptive_avg_pool2d(slope, size).flatten() / slope.mean().clamp_min(1e-9))
        outlines.append(F.max_pool2d(F.adaptive_max_pool2d(edge, size), 3, 1, 1).flatten())
    if len({len(s) for s in slopes}) > 1:
        return lambda i, j: None
    lines = torch.stack(outlines)
    under = (lines @ torch.stack(slopes).T / lines.sum(1, keepdim=True).clamp_min(1)).tolist()  # (N, N)
    clear = [0 < share < 0.5 for share in lines.mean(1).tolist()]
    return lambda i, j: under[i][j] if clear[i] else None


def steps(image: Tensor) -> Tensor:
    """Return the largest difference of each pixel (C, H, W) to the next one in its row and in its column."""
    across, down = (image.diff(dim=d).abs() for d in (2, 1))
    return torch.maximum(F.pad(across, (0, 1)), F.pad(down, (0, 0, 0, 1)))
