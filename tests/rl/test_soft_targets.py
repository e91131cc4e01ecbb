"""The definition of DQN's targets accepts those of a soft policy (Munchausen DQN, soft DQN), and nothing near them."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from trainworthy.recipes.rl import dqn
from trainworthy.recipes.rl.control.gates import definitions

STEPS, ENVS, TAU = 16, 4, 0.05


@pytest.fixture(scope="module")
def played() -> tuple[dict[str, Tensor], dqn.Policy, dqn.Policy]:
    """Random steps, an online network, a target network with a return scale of 2."""
    torch.manual_seed(0)
    policy, target = (dqn.Policy(3, 4, (16,), dueling=False).eval() for _ in range(2))
    target.returns.rms.fill_(2.0)
    policy.returns.rms.fill_(2.0)
    shape = (STEPS, ENVS)
    steps = {"observation": torch.randn(*shape, 3), "next_observation": torch.randn(*shape, 3), "action": torch.randint(4, shape),
             "reward": torch.randn(shape), "terminated": torch.rand(shape) < 0.1, "truncated": torch.zeros(shape, dtype=torch.bool)}  # fmt: skip
    return steps, policy, target


def soft(steps: dict[str, Tensor], target: dqn.Policy, *, weight: float, entropy: float = 1.0) -> Tensor:
    """Targets (steps, envs) in rewards; `entropy` 0 leaves the entropy of the next state out."""
    with torch.no_grad():
        log_p = (target(steps["next_observation"]) / TAU).log_softmax(-1)
        value = (log_p.exp() * (target(steps["next_observation"]) - entropy * TAU * log_p)).sum(-1)
        own = (target(steps["observation"]) / TAU).log_softmax(-1).gather(-1, steps["action"][..., None])[..., 0]
    bonus = weight * (TAU * own).clamp(-1, 0)
    return steps["reward"] + 2 * bonus + 0.99 * ~steps["terminated"] * 2 * value


def compared(played: tuple, returned: Tensor) -> dict[str, tuple[float, str]]:
    steps, policy, target = played
    batch = {
        "observation": steps["observation"].flatten(0, 1),
        "action": steps["action"].flatten(),
        "return": returned.flatten() / 2,
    }
    seen = SimpleNamespace(batch=batch, steps=steps, model=policy, target=target, misstored="",
                           run=SimpleNamespace(autocast=contextlib.nullcontext))  # fmt: skip
    return definitions.dqn(dqn.Config(double=True, dueling=False), seen)


@pytest.mark.parametrize("weight", [0.9, 0.0])
def test_soft_targets_are_named(weight: float, played):
    steps, _, target = played
    found = compared(played, soft(steps, target, weight=weight))
    ((name, (off, _)),) = [one for one in found.items() if "soft policy" in one[0]]
    assert off == 0.0
    assert f"temperature {2 * TAU:.3g}" in name
    assert f"{weight:.2g})" in name


def test_what_is_near_them_is_not(played):
    """Without the entropy of the next state, or with one reward in ten doubled."""
    steps, _, target = played
    due = soft(steps, target, weight=0.9)
    doubled = due + steps["reward"] * (torch.arange(due.numel()).view_as(due) % 10 == 0)
    for wrong in (soft(steps, target, weight=0.9, entropy=0.0), doubled):
        assert compared(played, wrong)["targets"][0] > 1e-3
