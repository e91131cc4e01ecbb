"""Statistics of one number over several seeds: mean and interquartile mean with intervals, the difference of two single
runs due to chance, and the fraction of runs above a score."""

import math
import statistics
from dataclasses import dataclass

import numpy as np


def student(freedom: float) -> float:
    """Two-sided 95% quantile of Student's t, for any degrees of freedom >= 1.

    With x = sqrt(freedom) tan(a) the density is cos(a) ** (freedom - 1), which is summed up to its quantile.
    """
    angle = np.linspace(0, np.pi / 2, 200_001)
    height = np.cos(angle) ** (freedom - 1)
    below = np.concatenate([[0.0], np.cumsum((height[1:] + height[:-1]) / 2)])
    return math.sqrt(freedom) * math.tan(np.interp(0.95 * below[-1], below, angle))


def interval(values: list[float]) -> tuple[float, float]:
    """95% interval of the mean of two or more values."""
    mean = statistics.fmean(values)
    half = student(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return mean - half, mean + half


def noise(values: list[float]) -> float:
    """Largest difference of two single runs in 95 of 100 cases, from two or more runs that differ only in the seed."""
    return student(len(values) - 1) * statistics.stdev(values) * math.sqrt(2)


def iqm(values: np.ndarray) -> np.ndarray:
    """Interquartile mean over the last axis, without the lowest and the highest quarter (as rliable, Agarwal 2021)."""
    ordered = np.sort(values, -1)
    cut = int(0.25 * ordered.shape[-1])
    return ordered[..., cut : ordered.shape[-1] - cut].mean(-1)


def iqm_interval(values: list[float], *, draws: int = 20_000) -> tuple[float, float]:
    """95% percentile-bootstrap interval of the interquartile mean. Runs are resampled with replacement (Agarwal 2021;
    one task is one stratum). The same values give the same interval."""
    rng = np.random.default_rng(0)
    again = rng.choice(np.asarray(values, float), (draws, len(values)))
    low, high = np.quantile(iqm(again), (0.025, 0.975))
    return float(low), float(high)


def bootstrap(values: np.ndarray, weights: np.ndarray | None = None, *, draws: int = 2_000) -> tuple[float, float]:
    """95% percentile-bootstrap interval (Efron 1979) of the mean of `values` (N,) over their samples; with `weights` of the sum of
    values over the sum of weights (nats over tokens). The same values give the same interval."""
    values = np.asarray(values, float)
    weights = np.ones(len(values)) if weights is None else np.asarray(weights, float)
    rng, found = np.random.default_rng(0), []
    at_once = max(1, 4_000_000 // max(1, len(values)))
    while len(found) < draws:
        again = rng.integers(len(values), size=(min(at_once, draws - len(found)), len(values)))
        found += (values[again].sum(1) / weights[again].sum(1)).tolist()
    low, high = np.quantile(found, (0.025, 0.975))
    return float(low), float(high)


def profile(values: list[float]) -> tuple[list[float], list[float]]:
    """Performance profile (Dolan 2002): (scores, fraction of the runs that reach each), as corners of a falling step
    function."""
    ordered = sorted(values)
    return ordered, [sum(v >= score for v in values) / len(values) for score in ordered]


def wilson(hits: int, n: int) -> tuple[float, float]:
    """95% interval of a fraction, `hits` of `n` (Wilson 1927)."""
    if not n:
        return 0.0, 1.0
    z, p = 1.96, hits / n
    middle, half = p + z * z / 2 / n, z * math.sqrt(p * (1 - p) / n + z * z / 4 / n / n)
    return max(0.0, (middle - half) / (1 + z * z / n)), min(1.0, (middle + half) / (1 + z * z / n))


@dataclass
class Difference:
    """Mean of `b` minus mean of `a` with its 95% interval."""

    value: float
    low: float
    high: float
    freedom: float

    @property
    def real(self) -> bool:
        """Return whether the interval excludes zero."""
        return self.low > 0 or self.high < 0


def welch(a: list[float], b: list[float]) -> Difference:
    """Difference of two means without assuming equal variances (Welch 1947), two or more values each."""
    va, vb = statistics.variance(a) / len(a), statistics.variance(b) / len(b)
    value, error = statistics.fmean(b) - statistics.fmean(a), math.sqrt(va + vb)
    if error == 0:  # all seeds gave the same number
        return Difference(value, value, value, math.inf)
    freedom = (va + vb) ** 2 / (va**2 / (len(a) - 1) + vb**2 / (len(b) - 1))
    half = student(freedom) * error
    return Difference(value, value - half, value + half, freedom)
