"""Rewards that a loop shapes (recipes/rl/control/gates/shaping.py): found exactly, and no mistake is taken for them."""

import pytest
import torch
from trainworthy.recipes.rl.control.gates import shaping

T, E, DECAY = 40, 4, 0.95


@pytest.fixture
def steps() -> dict[str, torch.Tensor]:
    """Steps of four environments whose reward is a function of the observation, in episodes of about ten steps."""
    torch.manual_seed(0)
    seen = torch.randn(T + 1, E, 3)
    return {
        "observation": seen[:-1], "next_observation": seen[1:], "action": torch.randint(2, (T, E)), "reward": seen[1:, :, 0],
        "terminated": torch.rand(T, E) < 0.1, "truncated": torch.rand(T, E) < 0.05,
    }  # fmt: skip


def found(steps: dict, added: torch.Tensor, *, length: int = 0, noise: float = 0.0) -> torch.Tensor | None:
    """What `added` gives for every second step, if targets contain the sums of these rewards."""
    over = steps["terminated"] | steps["truncated"]
    each = added.double()[..., None]
    rows = [(t, i, shaping._sum(each, t, i, DECAY, over, length).item() + noise * torch.randn(()).item())
            for t in range(0, T, 2) for i in range(E)]  # fmt: skip
    return shaping.added(steps, rows, decay=DECAY, over=over, length=length)


@pytest.mark.parametrize("length", [0, 1, 3])
@pytest.mark.parametrize("of", ["place", "end", "action", "potential"])
def test_a_function_of_the_step_is_found(steps: dict, of: str, length: int):
    before, after = steps["observation"], steps["next_observation"]
    added = {"place": -0.1 * after[..., 0].abs(), "end": -10.0 * steps["terminated"], "action": 0.2 * steps["action"],
             "potential": 0.95 * after[..., 1].square() - before[..., 1].square()}[of]  # fmt: skip
    got = found(steps, added, length=length)
    assert got is not None
    assert torch.allclose(got, added.double(), atol=1e-4)


def test_mistakes_are_no_shaping(steps: dict):
    """One number on every reward, the reward of a neighbouring step, differences that are random, or next to nothing."""
    reward = steps["reward"]
    assert found(steps, torch.ones(T, E)) is None
    assert found(steps, torch.zeros(T, E)) is None
    assert found(steps, torch.zeros(T, E), noise=0.1) is None
    assert found(steps, steps["observation"][..., 0] - reward, length=1) is None
    assert found(steps, torch.where(steps["terminated"], torch.randn(T, E), 0.0)) is None
    steps["reward"] = torch.ones(T, E)
    for lost in (-1.0, 1.0):  # the last reward of an episode is masked, or counted twice
        assert found(steps, lost * steps["terminated"]) is None
