"""A score that leaves out the tokens with little context is told from other wrong scores."""

import math
import random

import pytest
from trainworthy.recipes.llm.gates.pretrain import left_out


def documents(seed: int) -> list[tuple[int, float, int]]:
    """(tokens before it, nats, bytes) of the tokens of four documents; the first tokens are the hardest."""
    draws = random.Random(seed)
    return [(i, draws.uniform(1, 6) + 8 / i, draws.randint(1, 5)) for n in (120, 30, 28, 25) for i in range(1, n)]


def bits(rows: list[tuple[int, float, int]], size: int) -> float:
    return sum(n for _, n, _ in rows) / math.log(2) / size


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("least", [2, 16, 64])
def test_the_least_context_is_named(least: int, seed: int):
    rows = documents(seed)
    some, whole = [r for r in rows if r[0] >= least], sum(b for _, _, b in rows)
    said = f"fewer than {least} tokens before them"
    assert said in left_out({bits(some, whole)}, rows, 1e-4)
    assert "denominator" in left_out({bits(some, whole)}, rows, 1e-4)
    fewer = left_out({bits(some, sum(b for _, _, b in some))}, rows, 1e-4)
    assert said in fewer
    assert "denominator" not in fewer


@pytest.mark.parametrize("seed", range(10))
def test_other_scores_are_not_explained(seed: int):
    rows = documents(seed)
    right = bits(rows, sum(b for _, _, b in rows))
    for wrong in (right * math.log(2), right * 3, right * 0.05, math.nan):
        assert left_out({wrong}, rows, 1e-4) == ""
    few = bits([r for r in rows if r[0] >= 16], sum(b for _, _, b in rows))
    assert left_out({few, right}, rows, 1e-4) == "", "another score in each size of batches"
