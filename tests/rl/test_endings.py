"""An episode that ends inside an environment must not be reported as truncated; one that is cut must."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from trainworthy.recipes.rl.control.data.environments import Environments, draw
from trainworthy.recipes.rl.control.gates import endings


class Ledge(gym.Env):
    """A walk that falls off on either side."""

    observation_space = gym.spaces.Box(-5, 5, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)
    at = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = int(self.np_random.integers(-1, 2))
        return np.float32([self.at]), {}

    def step(self, action):
        self.at += 1 if action else -1
        return np.float32([self.at]), 1.0, abs(self.at) >= 4, False, {}


class PassesOn(gym.Wrapper):
    def step(self, action):
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, reward, False, terminated or truncated, info


class Twice(gym.Wrapper):
    """Repeats an action until the episode ends."""

    def step(self, action):
        found = self.env.step(action)
        return found if found[2] or found[3] else self.env.step(action)


class Endless(gym.Wrapper):
    """Falls begin again inside; only the time limit ends an episode."""

    def step(self, action):
        observation, reward, terminated, truncated, info = self.env.step(action)
        if terminated:
            observation, _ = self.env.reset()
        return observation, reward - terminated, False, truncated, info


class Bounds(Ledge):
    """Leaving the map cuts an episode, as gymnasium allows; the goal, which random actions never reach, ends it."""

    def step(self, action):
        observation, reward, out, _, info = super().step(action)
        return observation, reward, False, out, info


MADE = {
    "Ledge": lambda: Ledge(),
    "LedgePassedOn": lambda: PassesOn(Ledge()),
    "LedgePassedOnInside": lambda: Twice(PassesOn(Ledge())),
    "LedgeTwice": lambda: Twice(Ledge()),
    "LedgeEndless": lambda: Endless(Ledge()),
    "LedgeBounds": lambda: Bounds(),
}
for name, made in MADE.items():
    gym.register(f"endings/{name}-v0", made, max_episode_steps=20)


def found(name: str, seed: int, stack: int = 1) -> tuple[str, str]:
    envs = Environments(name, 4, seed=seed, stack=stack)
    actions = draw(envs.vector.single_action_space, (80, 4), torch.Generator().manual_seed(seed))
    return endings.as_truncations(name, stack, [envs.step(row) for row in actions], seed)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", ["LedgePassedOn", "LedgePassedOnInside"])
def test_an_end_that_is_passed_on_as_a_truncation_is_a_fault(name: str, seed: int):
    fault, _ = found(f"endings/{name}-v0", seed)
    assert "reports `terminated`, PassesOn reports `truncated` instead" in fault


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("name", "remark"),
    [
        ("endings/Ledge-v0", ""),
        ("endings/LedgeTwice-v0", ""),
        ("endings/LedgeEndless-v0", "all as truncated"),
        ("endings/LedgeBounds-v0", "all as truncated"),
        ("CartPole-v1", ""),
        ("Pendulum-v1", ""),
    ],
)
def test_other_ends_are_no_fault(name: str, remark: str, seed: int):
    assert found(name, seed) == ("", remark)


def test_frames_that_are_stacked_change_nothing():
    assert found("endings/LedgePassedOn-v0", 0, stack=2)[0]
    assert found("endings/LedgeBounds-v0", 0, stack=2) == ("", "all as truncated")
