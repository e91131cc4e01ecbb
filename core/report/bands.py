"""The band of a recipe's healthy runs: how it is made from run folders, and where another run leaves it."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from trainworthy.core.base import config
from trainworthy.core.recipe.stage import Metric
from trainworthy.core.report.folder import Folder, read, series
from trainworthy.core.report.html import num

POINTS = 1500  # per curve
KEPT = 100  # points of a band
PATIENCE = 0.1  # fraction of the band's points in a row outside it that counts as having left it
OUTSIDE = 5.0  # half widths from the middle of a band of five: 5.8 standard deviations, or one healthy run in 170 at one point
EVALUATIONS, DOUBT = 3, 0.1  # clearly worse: evaluations in a row, and fraction of the range from chance to the band
OVERFIT = "gates/overfit"
UNLEARNT = ("run", "gates", "loader", "track", "trust_pickle")  # groups of settings that change no curve


def thin(x: np.ndarray, y: np.ndarray, points: int = POINTS) -> tuple[np.ndarray, np.ndarray]:
    """Return at most `points` points, including the last."""
    keep = np.unique(np.linspace(0, len(x) - 1, min(len(x), points)).round().astype(int)) if len(x) else []
    return x[keep], y[keep]


def smooth(x: np.ndarray, y: np.ndarray, total: float = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return the centred (lag-free) Gaussian mean over about 2% of the run's `total` steps (default: the steps so far),
    without non-finite steps. Long runs are first averaged in POINTS blocks, since a million steps would take a
    minute."""
    done = len(y) / max(total, len(y), 1)
    blocks = math.ceil(min(len(y), POINTS * done))
    starts = np.unique(np.linspace(0, len(y), blocks, endpoint=False).astype(int))
    finite = np.isfinite(y)
    count, mass = np.add.reduceat(finite.astype(float), starts), np.add.reduceat(np.where(finite, y, 0.0), starts)
    width = max(1.0, blocks / done / 120)
    reach = min(int(3 * width), (len(starts) - 1) // 2)
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / width) ** 2)
    weight, mean = (np.convolve(v, kernel, "same") for v in (count, mass))
    middle = np.append(starts[1:], len(y)) - 1
    return x[middle], np.divide(mean, weight, out=np.full(len(starts), math.nan), where=weight > 1e-9)


@dataclass
class Band:
    """Lowest, middle and highest of the healthy runs at the steps `x`."""

    x: np.ndarray
    low: np.ndarray
    median: np.ndarray
    high: np.ndarray

    @classmethod
    def of(cls, curves: list[tuple[np.ndarray, np.ndarray]]) -> "Band":
        """Build the band of one (x, y) per run, at up to KEPT points. A run that ended early keeps its last value."""
        longest = max((x for x, _ in curves), key=lambda x: x[-1])
        x = thin(longest, longest, KEPT)[0]
        y = np.array([np.interp(x, *curve) for curve in curves])
        return cls(x, y.min(0), np.median(y, axis=0), y.max(0))

    @classmethod
    def read(cls, kept: dict[str, list[float]]) -> "Band":
        return cls(**{k: np.array(v, float) for k, v in kept.items()})

    def kept(self) -> dict[str, list[float]]:
        """Content of the file, with five digits."""
        return {k: [float(f"{v:.5g}") for v in values] for k, values in vars(self).items()}

    def place(self, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (steps, position of the line (x, y) there: -1 at the band's lower edge, 1 at its upper one). The
        band's width is its mean over a tenth of the run, because five runs may coincide at a single point."""
        at = self.x[self.x <= x[-1]]
        width, reach = self.high - self.low, max(1, len(self.x) // 20)
        half = np.array([width[max(0, i - reach) : i + reach + 1].mean() / 2 for i in range(len(at))])
        middle = ((self.low + self.high) / 2)[: len(at)]
        return at, (np.interp(at, x, y) - middle) / np.maximum(half, 1e-4 * np.abs(middle) + 1e-12)

    def left(self, x: np.ndarray, y: np.ndarray) -> tuple[float, float, int] | None:
        """Return (first step outside, last step outside or inf if it did not return, +1 above or -1 below) of the line
        (x, y).

        Outside means beyond OUTSIDE for the fraction PATIENCE of the band's points in a row. A sixth healthy run is out
        of the range of five for 25-80% of its length (measured).
        """
        at, place = self.place(x, y)
        side = np.where(np.abs(place) > OUTSIDE, np.sign(place), 0)
        n, patience = len(at), max(2, math.ceil(PATIENCE * len(self.x)))
        for i in range(n - patience + 1):
            if side[i] and (side[i : i + patience] == side[i]).all():
                back = next((j for j in range(i, n) if side[j] != side[i]), n)
                return float(at[i]), float(at[back - 1]) if back < n else math.inf, int(side[i])
        return None


def banded_curves(f: Folder, total: float = 0) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """{tag: (steps, values)} of the curves that have a band; steps are smoothed as in a run of `total` steps."""
    found = {k: series(f.steps, k) for k in ("step/loss", "step/grad_norm")}
    found = {k: smooth(*v, total) for k, v in found.items() if len(v[0]) > 1}
    found |= {k: series(f.rows, k) for k in (f"val/{f.summary.get('metric')}", f.val_loss)}
    overfit = next((v for v in f.verdicts if v["id"] == "overfit"), {})
    curve = [(step, loss) for step, loss, *_ in overfit.get("evidence", {}).get("curve", [])]
    found[OVERFIT] = tuple(np.array(curve, float).reshape(-1, 2).T)
    return {k: (x, y) for k, (x, y) in found.items() if len(x) > 1}


@dataclass
class Departure:
    """A curve that left the band of the healthy runs."""

    tag: str
    words: str
    worse: bool
    lasts: bool


@dataclass
class Healthy:
    """The band of a recipe's healthy runs, as applied to one run folder."""

    bands: dict[str, Band]
    seeds: int
    date: str
    unlike: str
    """Why the band is not drawn; empty if it is."""
    differs: str
    """Settings that differ from the band's, except those named by `unlike`."""
    parent: str = ""
    """The recipe of the band's runs, if this run's recipe is a fork of it."""

    @property
    def name(self) -> str:
        of = f" of {self.parent}, which this was forked from" * bool(self.parent)
        return f"the band of healthy runs{of} ({self.seeds} seeds, {self.date})"

    def behind(self, tag: str, steps: np.ndarray, values: np.ndarray, *, higher: bool, floor: float) -> str:
        """Report if a metric is clearly worse than every healthy run, and since when: in its last EVALUATIONS by
        OUTSIDE half widths of the band, and by the fraction DOUBT of the range from chance to it. Empty if it is
        not."""
        if tag not in self.bands or len(steps) < EVALUATIONS:
            return ""
        band, sign = self.bands[tag], 1 if higher else -1
        edge = np.interp(steps, band.x, band.low if higher else band.high)
        half = np.interp(steps, band.x, band.high - band.low) / 2
        span = np.abs(np.interp(steps, band.x, band.median) - floor) if math.isfinite(floor) else np.abs(edge)
        worse = sign * (edge - values) > np.maximum((OUTSIDE - 1) * half, DOUBT * span)
        worse |= ~np.isfinite(values)
        if not worse[-EVALUATIONS:].all():
            return ""
        since = len(worse) - int(np.argmin(worse[::-1])) if not worse.all() else 0
        low, high = (float(np.interp(steps[-1], band.x, v)) for v in (band.low, band.high))
        return (
            f"{tag.removeprefix('val/')} {values[-1]:.4g} at step {num(steps[-1])}, where healthy runs had {low:.4g} to {high:.4g}"
            f"; behind since step {num(steps[since])} ({self.name}).{self.otherwise}"
        )

    def words(self, f: Folder) -> str:
        """Describe in one line whether this run left the band, where first and in which direction."""
        name = self.name
        if self.unlike:
            return f"{name[0].upper()}{name[1:]} is not drawn: {self.unlike}.{self.otherwise}"
        left = "; ".join(d.words for d in self.departures(f))
        first = f"Left {name}: {left}." if left else f"Within {name}{'' if f.finished else ' so far'}."
        return first + self.otherwise

    @property
    def otherwise(self) -> str:
        """The sentence that names the differing settings."""
        return f" Settings that differ from those runs: {self.differs}." if self.differs else ""

    @property
    def total(self) -> float:
        return self.bands["step/loss"].x[-1] if self.bands else 0

    def departures(self, f: Folder) -> list[Departure]:
        """Return every curve that left its band, worst kinds first."""
        found = []
        for tag, curve in banded_curves(f, self.total).items():
            if tag in self.bands and (left := self.bands[tag].left(*curve)):
                found.append(_departure(f, tag, *left))
        return sorted(found, key=lambda d: not d.worse)


def name_of(f: Folder, tag: str) -> str:
    names = {"step/loss": "training loss", "step/grad_norm": "gradient norm", OVERFIT: "loss of the overfit gate"}
    return names.get(tag, tag if tag == f.val_loss else tag.removeprefix("val/"))


def _departure(f: Folder, tag: str, first: float, last: float, side: int) -> Departure:
    metric = f"val/{f.summary.get('metric')}"
    unit, place = "step", num
    if tag.startswith("val/"):  # evaluations are reported by epoch
        x, epochs = series(f.rows, "epoch")
        unit, place = "epoch", lambda step: f"{np.interp(step, x, epochs):.4g}"
    good = 1 if tag == metric and f.summary.get("higher_is_better", True) else -1
    span = f"from {unit} {place(first)} on" if math.isinf(last) else f"from {unit} {place(first)} to {place(last)}"
    words = f"{name_of(f, tag)} {'above' if side > 0 else 'below'} the band {span}"
    return Departure(tag, words, worse=side != good and tag != "step/grad_norm", lasts=math.isinf(last))


def healthy(f: Folder) -> Healthy | None:
    """Return the band stored next to this run's recipe; None if there is none. It is drawn only if steps are
    comparable: same epochs, same samples per step, same data."""
    r = f.reference
    if not r:
        return None
    mine = flat(f.settings)
    other = {k: f"{k} {mine[k]} (band: {v})" for k, v in r["settings"].items() if k in mine and mine[k] != v}
    unlike = [other.pop(k) for k in ("train.epochs", "train.batch_size") if k in other]
    if mine.get("train.max_steps"):
        unlike.append(f"train.max_steps {mine['train.max_steps']}")
    if f.data.get("fingerprint") != r["data"]:
        unlike.append("other data")
    bands = {} if unlike else {k: Band.read(v) for k, v in r["bands"].items()}
    return Healthy(bands, len(r["seeds"]), r["date"], ", ".join(unlike), ", ".join(other.values()), r.get("of", ""))


def watch(folder: Path, metric: Metric) -> Callable[[list[dict[str, float]]], str]:
    """A function of a running run's evaluations: where they are clearly worse than the healthy runs of its recipe, or ""."""
    found: list[Healthy | None] = []

    def behind(history: list[dict[str, float]]) -> str:
        if not found:
            found.append(healthy(read(folder)))
        band, tag = found[0], f"val/{metric.name}"
        if band is None:
            return ""
        return band.behind(tag, *series(history, tag), higher=metric.higher_is_better, floor=metric.floor)

    return behind


def outside(f: Folder) -> str:
    """Report if the newest evaluations of a run, finished or not, are clearly below the band."""
    known, name = healthy(f), f.summary.get("metric")
    floor = f.summary.get("floor")
    if not known or not name:
        return ""
    how = {"higher": f.summary.get("higher_is_better", True), "floor": math.nan if floor is None else float(floor)}
    return known.behind(f"val/{name}", *series(f.rows, f"val/{name}"), **how)


def flat(settings: dict[str, Any]) -> dict[str, Any]:
    """{"optim.lr": 0.003, ...} of settings that change what is learnt, not only where or how fast."""
    return config.flat({group: value for group, value in settings.items() if group not in UNLEARNT})


def reference(folders: list[Folder]) -> dict[str, Any]:
    """Return the content of results/NAME.band.json, from folders of healthy runs of one recipe with one group of
    settings."""
    first = folders[0]
    each = [banded_curves(f) for f in folders]
    tags = [tag for tag in each[0] if all(tag in found for found in each)]
    return {
        "recipe": first.args["recipe"], "preset": first.args["preset"], "date": time.strftime("%Y-%m-%d"),
        "versions": first.environment["versions"], "seeds": [f.settings["run"]["seed"] for f in folders],
        "settings": flat(first.settings), "data": first.data["fingerprint"],
        "bands": {tag: Band.of([found[tag] for found in each]).kept() for tag in tags},
    }  # fmt: skip
