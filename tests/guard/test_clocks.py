"""A calendar next to a series: counted from another moment in the evaluation, as in training, or with a series that changes."""

import time

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset
from trainworthy.guard.measures.data import clocks

HOURS = np.arange(6000)


def load(t: np.ndarray) -> np.ndarray:
    """A morning's and an evening's peak, lower at weekends."""
    hour, workday = t % 24, t // 24 % 7 < 5
    noise = np.random.default_rng(0).normal(size=len(t)) * 0.2
    return np.exp(-((hour - 8) ** 2) / 6) + 1.5 * np.exp(-((hour - 18) ** 2) / 10) * (0.5 + 0.5 * workday) + noise


def angles(t: np.ndarray) -> np.ndarray:
    return np.stack([f(2 * np.pi * x) for x in (t % 24 / 24, t // 24 % 7 / 7) for f in (np.sin, np.cos)], 1)


def numbers(t: np.ndarray) -> np.ndarray:
    return np.stack([t % 24, t // 24 % 7, t // 720], 1)


def cut(values: np.ndarray, calendar: np.ndarray, split: bool) -> TensorDataset:
    """Windows of 48 steps, with their calendar in one entry or in an entry of its own."""
    starts = range(0, len(values) - 48, 5)
    x, c = (torch.tensor(np.stack([v[i : i + 48] for i in starts]), dtype=torch.float32) for v in (values, calendar))
    return (
        TensorDataset(x[..., None], c, x[:, -1]) if split else TensorDataset(torch.cat([x[..., None], c], 2), x[:, -1])
    )


def found(calendar, series=load, split=False, first=0) -> str:
    values = series(HOURS)
    train = cut(values[:4005], calendar(HOURS[:4005]), split)
    held_out = cut(values[4005:], calendar(HOURS[4005:] - first), split)
    return (clocks.check(train, [held_out], time.monotonic() + 20) or ("",))[0]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("calendar", [angles, numbers])
def test_a_calendar_that_starts_anew(calendar, split: bool) -> None:
    assert not found(calendar, split=split)
    text = found(calendar, split=split, first=4005)
    assert "27 steps earlier" in text, text


@pytest.mark.parametrize("series", [
    lambda t: load(t - t // 2000),  # the peaks move by an hour a season
    lambda t: load(t) * (1 - t / 5000),  # they vanish, and become valleys
    lambda t: np.random.default_rng(1).normal(size=len(t)).cumsum() / 20,
])  # fmt: skip
def test_a_series_that_changes(series) -> None:
    assert not found(angles, series)


def test_no_calendar() -> None:
    values = torch.randn(200, 48, 3)
    data = TensorDataset(values, values[:, -1, 0])
    assert clocks.check(data, [data], time.monotonic() + 20) is None
    pictures = TensorDataset(torch.rand(100, 1, 8, 8), torch.zeros(100))
    assert clocks.check(pictures, [pictures], time.monotonic() + 20) is None
