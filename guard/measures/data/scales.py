"""Compares what a model gets in training with what it gets in an evaluation: the scale of all values, the scale of each column, the ends
of a range, the values of inputs that have only a few."""

import contextlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

CALLS = 400  # measured calls
READ = 2**18  # entries of an input that are read
HEAD = 4096  # entries whose distinct values are counted
ROWS = 64  # rows of each side from which on columns are compared
WIDE = 512  # columns that are compared
LEVELS = 16
OFTEN = 0.2  # share of the values of inputs that have only a few
RANGES = ((0.0, 1.0), (-1.0, 1.0), (0.0, 255.0), (-0.5, 0.5))
SCALE = 3.0
SAMPLES = 64  # that are read of an evaluation's beginning, and of all of it
APART = 1.4  # ratio of their standard deviations
SMOOTH = 0.5  # change from one place to the next, in standard deviations
FLAT = 0.02  # standard deviation of pictures, in shares of their mean
DIFFERENT = "training and validation are normalised differently, or one is normalised twice"


UNITS = "the mean and the standard deviation with which they are normalised have another unit (0 to 255) than the pictures (0 to 1)"


@dataclass
class Measures:
    """What is kept of the inputs of one model, in training or in one evaluation."""

    max_levels: int = LEVELS
    """Inputs with at most so many distinct values have no scale: masks, levels."""
    calls: int = 0
    dim: int = 0
    rows: list[tuple[float, float]] = field(default_factory=list)
    """Mean and standard deviation of each call's input."""
    ends: list[tuple[float, float]] = field(default_factory=list)
    values: Counter = field(default_factory=Counter)
    many: bool = False
    """One of the inputs had more than a few values."""
    steps: list[float] = field(default_factory=list)
    """Mean change from one place of an input (N, T) or (N, T, F) to the next, in standard deviations: below one half it is a series."""
    columns: dict[int, Tensor] = field(default_factory=dict)
    """By the number of columns: number, sum and sum of squares of their values, and in how many calls they had more than 8 of them."""

    def read(self, x: Tensor) -> None:
        """Note one input."""
        self.calls += 1
        if x.dim() < 2 or not x.numel() or self.calls > CALLS:
            return
        part = x.detach().flatten()[:READ].float()
        distinct, count = part[:HEAD].unique(return_counts=True)
        self.dim = max(self.dim, x.dim())
        self.many |= len(distinct) > LEVELS
        if 1 < len(distinct) <= LEVELS and not self.many:
            self.values.update({round(v, 4): n for v, n in zip(distinct.tolist(), count.tolist(), strict=True)})
        if len(distinct) <= self.max_levels:
            return
        self.rows.append((float(part.mean()), float(part.std())))
        self.ends.append((float(part.min()), float(part.max())))
        if x.dim() < 4 and x.shape[1] > 2 and self.rows[-1][1] > 0:
            some = x.detach()[: max(1, READ // x[0].numel())].float()
            self.steps.append(float(some.diff(dim=1).abs().mean()) / self.rows[-1][1])
        if x.dim() < 4 and x.shape[-1] <= WIDE:
            self._columns(x.detach().flatten(0, -2)[: READ // x.shape[-1]].double())

    def _columns(self, x: Tensor) -> None:
        varied = (x[:256].sort(0).values.diff(dim=0) != 0).sum(0) >= 8
        row = torch.stack([torch.full_like(x[0], len(x)), x.sum(0), (x**2).sum(0), varied.double()]).cpu()
        self.columns[x.shape[1]] = self.columns.get(x.shape[1], torch.zeros_like(row)) + row


def fault(trained: Measures, other: Measures) -> str:
    """Return how an evaluation's inputs differ in range, values or columns from training's; empty if they do not."""
    return ranges(trained, other) or levels(trained, other) or columns(trained, other)


def goes_on(trained: Measures, other: Measures) -> bool:
    """Return whether an evaluation's inputs are a series that begins within the values of training's and leaves them at one end: a split
    in time of what grows or falls."""
    both = [*trained.steps, *other.steps]
    if not both or sorted(both)[len(both) // 2] > SMOOTH:
        return False
    (low, high), (least, most) = (
        (min(a for a, _ in one.ends), max(b for _, b in one.ends)) for one in (trained, other)
    )
    return low <= least <= high < most or least < low <= most <= high


def begins_otherwise(loaders: Iterable[tuple[DataLoader, int]], dim: int) -> bool:
    """Return whether the first samples of an evaluation have another scale than samples from all of it: tiles of a photograph in their order
    begin with the sky, and a rehearsal reads the first batches alone. `loaders`: with the number of batches that were read."""
    for loader, batches in loaders:
        data, size = loader.dataset, loader.batch_size or 1
        with contextlib.suppress(Exception), torch.random.fork_rng(devices=[]):
            total = len(data)  # type: ignore[arg-type]
            first = min(total, batches * size, SAMPLES)
            if not 0 < first < total:
                continue
            begun, whole = (
                torch.cat([values(data[i], dim - 1) for i in places])
                for places in (range(first), range(0, total, max(1, total // SAMPLES)))
            )
            narrow, wide = sorted((float(begun.std()), float(whole.std())))
            if wide > APART * narrow or abs(float(begun.mean() - whole.mean())) > wide:
                return True
    return False


def pooled(rows: list[tuple[float, float]]) -> tuple[float, float]:
    """Return mean and standard deviation of all calls together: batches of an evaluation in the order of a photograph's tiles differ in their
    means, and each of them varies little."""
    mean = sum(m for m, _ in rows) / len(rows)
    return mean, (sum(s**2 + (m - mean) ** 2 for m, s in rows) / len(rows)) ** 0.5


def values(sample: Any, dim: int) -> Tensor:
    """Return the values of the first entry of a sample with so many axes."""
    return next(torch.as_tensor(x).float().flatten() for x in tree_leaves(sample) if getattr(x, "ndim", -1) == dim)


def flat(trained: Measures) -> str:
    """Return that pictures are all but one constant in training: they vary by less than a fiftieth of their mean."""
    rows = [row for row in trained.rows if row[1] == row[1]]
    if trained.dim != 4 or len(rows) < 3:
        return ""
    mean, spread = pooled(rows)
    if spread >= FLAT * abs(mean):
        return ""
    return f"pictures are almost constant: mean {mean:.3g}, standard deviation {spread:.2g}"


def known_range(ends: list[tuple[float, float]]) -> tuple[float, float] | None:
    """Return the common range that nearly every call fills to both its ends."""
    for low, high in RANGES:
        slack = 0.002 * (high - low)
        filled = sum(abs(a - low) < slack and abs(b - high) < slack for a, b in ends)
        if filled >= 0.9 * len(ends) > 0:
            return low, high
    return None


def ranges(trained: Measures, other: Measures) -> str:
    """Return which two common ranges the inputs fill; empty if they do not."""
    a, b = known_range(trained.ends), known_range(other.ends)
    if a is None or b is None or a == b or len(trained.ends) < 4:
        return ""
    return f"inputs range from {a[0]:g} to {a[1]:g} in training, from {b[0]:g} to {b[1]:g} in evaluation"


def frequent(values: Counter) -> list[float]:
    """Return the values that are no exceptions."""
    return sorted(v for v, n in values.items() if n >= 0.002 * values.total())


def levels(trained: Measures, other: Measures) -> str:
    """Return how the few values of inputs were scaled and shifted; empty if they are the same ones, or not as a whole."""
    ours, theirs = frequent(trained.values), frequent(other.values)
    if not 2 <= len(ours) == len(theirs) <= LEVELS or min(trained.values.total(), other.values.total()) < HEAD:
        return ""
    if trained.many or other.many:
        return ""
    a = (theirs[-1] - theirs[0]) / (ours[-1] - ours[0])
    b = theirs[0] - a * ours[0]
    if max(abs(a * x + b - y) for x, y in zip(ours, theirs, strict=True)) > 1e-3 * (theirs[-1] - theirs[0]):
        return ""
    if abs(b) < 1e-3 * (theirs[-1] - theirs[0]) and 1 / SCALE <= a <= SCALE:
        return ""  # dropout of inputs multiplies those that are left
    new = sum(n for v, n in other.values.items() if not near(v, ours)) / other.values.total()
    lost = max((n for v, n in trained.values.items() if not near(v, theirs)), default=0) / trained.values.total()
    if new < OFTEN or lost < OFTEN:
        return ""
    listed = [", ".join(f"{v:.3g}" for v in row[:4]) + (", ..." if len(row) > 4 else "") for row in (ours, theirs)]
    return f"inputs have the values {listed[0]} in training and {listed[1]} in evaluation: {new:.0%} of these never occur in training"


def near(value: float, values: list[float]) -> bool:
    """Return whether a value is one of some values, up to rounding."""
    return any(abs(value - v) < 1e-3 for v in values)


def columns(trained: Measures, other: Measures) -> str:
    """Return how many columns have another scale; empty if fewer than half of those that are numbers, or not three, have, or all have
    changed alike."""
    for width in trained.columns.keys() & other.columns.keys():
        a, b = trained.columns[width], other.columns[width]
        if min(float(a[0, 0]), float(b[0, 0])) < ROWS:
            continue
        (mean_a, std_a), (mean_b, std_b) = moments(a), moments(b)
        numbers = (a[3] > 0) & (b[3] > 0) & (std_a > 0) & (std_b > 0)
        spread = torch.maximum(std_a, std_b)
        off = numbers & (((mean_a - mean_b).abs() > 2 * spread) | (spread > SCALE * torch.minimum(std_a, std_b)))
        if int(off.sum()) >= max(3, 0.5 * int(numbers.sum())) and unlike(off, mean_a, std_a, mean_b, std_b):
            i = int(off.nonzero()[0])
            return (
                f"{int(off.sum())} of {int(numbers.sum())} columns of the inputs have another scale in evaluation, the first of them mean "
                f"{mean_b[i]:.3g}, std {std_b[i]:.3g}; in training mean {mean_a[i]:.3g}, std {std_a[i]:.3g}"
            )
    return ""


def unlike(off: Tensor, mean_a: Tensor, std_a: Tensor, mean_b: Tensor, std_b: Tensor) -> bool:
    """Return whether the columns differ in what happened to them. The lags of one series that grows are all shifted alike."""
    shift, ratio = ((mean_b - mean_a) / std_a)[off], (std_b / std_a)[off]
    return float(shift.max() - shift.min()) > 2 or float(ratio.max()) > SCALE * float(ratio.min())


def moments(sums: Tensor) -> tuple[Tensor, Tensor]:
    """Return means and standard deviations."""
    mean = sums[1] / sums[0]
    return mean, (sums[2] / sums[0] - mean**2).clamp_min(0).sqrt()
