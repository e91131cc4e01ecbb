"""Which rates that a loop sets by itself are a usual schedule, and which are a fault."""

import math
from collections.abc import Callable

import pytest
from trainworthy.core.gates.causes.own_rates import fits


def cosine(n: int, end: float = 0.1, warm: float = 0.05, times: float = 1.0) -> list[float]:
    """A warm-up, then a cosine to `end`; `times` as fast as the run."""
    w = max(1, round(warm * n))
    fall = [min(1.0, times * i / (n - w)) for i in range(n - w)]
    return [(i + 1) / (w + 1) for i in range(w)] + [end + (1 - end) * (1 + math.cos(math.pi * x)) / 2 for x in fall]


SCHEDULES: dict[str, tuple[Callable[[int], list[float]], bool]] = {
    "to a tenth": (cosine, True),
    "linear to a fifth": (lambda n: [1 - 0.8 * i / n for i in range(n)], True),
    "exponential in the share of the run": (lambda n: [0.05 ** (i / n) for i in range(n)], True),
    "stepped twice": (lambda n: cosine(n, 0.0, times=2), False),
    "stepped twice, with a floor": (lambda n: cosine(n, times=2), False),
    "stepped too seldom": (lambda n: cosine(n, 0.0, times=0.4), False),
    "constant": (lambda n: [1.0] * n, False),
    "by a count of its own": (lambda n: [0.9**i for i in range(n)], False),
    "rises again": (lambda n: [0.5 * (1 + math.cos(2 * math.pi * i / n)) for i in range(n)], False),
    "half of the peak": (lambda n: [x / 2 for x in cosine(n)], False),
    "a step left out": (lambda n: cosine(n)[1:], False),
}


@pytest.mark.parametrize("n", [12, 20])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_of_the_loop_s_own(name: str, n: int) -> None:
    rates, usual = SCHEDULES[name]
    assert fits(rates(n), n, lambda: rates(2 * n)) is usual
