"""Environments so small that their values and best actions are known analytically (after Andy Jones, "Debugging RL, without the agonizing
pain", 2021). Each needs one more part of an agent than the one before, so the first failure names the part. In the last, larger one the
newest observation is not sufficient."""

from typing import Any

import gymnasium as gym
import numpy as np


class Probe(gym.Env):
    """An episode of `length` steps. `rule(signal, action, step)` gives the reward. The observation is (signal, step), shifted and scaled;
    with `brief` the signal is visible in the first step only. It ends by termination, with `limited` by truncation. An action is one of
    `actions`, or with `box` a number between the first and the second of two."""

    def __init__(self, rule, *, length: int = 1, actions: int = 1, limited: bool = False, random: bool = False,
                 brief: bool = False, shift: float = 0.0, scale: float = 1.0, box: bool = False,
                 render_mode: str | None = None):  # fmt: skip
        self.rule, self.length, self.limited, self.random, self.brief = rule, length, limited, random, brief
        self.shift, self.scale, self.render_mode = shift, scale, render_mode
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = gym.spaces.Box(0.0, 1.0, (1,)) if box else gym.spaces.Discrete(actions)

    def _look(self) -> np.ndarray:
        time = 0 if self.limited else self.time  # a time limit is not part of the environment's state
        signal = 0 if self.brief and self.time else self.signal
        return (self.shift + self.scale * np.array([signal, time])).astype(np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.time = 0
        self.signal = int(self.np_random.integers(2)) * 2 - 1 if self.random else 0
        return self._look(), {}

    def step(self, action: int | np.ndarray):
        reward = float(self.rule(self.signal, np.asarray(action).item(), self.time))
        self.time += 1
        over = self.time >= self.length
        return self._look(), reward, over and not self.limited, over and self.limited, {}


PROBES: dict[str, dict[str, Any]] = {
    "constant": {"rule": lambda signal, action, step: 1},
    "observation": {"rule": lambda signal, action, step: signal, "random": True},
    "delay": {"rule": lambda signal, action, step: step == 1, "length": 2},
    "action": {"rule": lambda signal, action, step: 2 * action - 1, "actions": 2},
    "later": {"rule": lambda signal, action, step: (2 * action - 1) * (step == 1), "actions": 2, "length": 2},
    "both": {"rule": lambda signal, action, step: signal * (2 * action - 1), "actions": 2, "random": True},
    "memory": {"rule": lambda signal, action, step: signal * (2 * action - 1) * (step == 1), "actions": 2, "length": 2,
               "random": True, "brief": True},
    "scale": {"rule": lambda signal, action, step: 1000 * signal * (2 * action - 1), "actions": 2, "random": True,
              "shift": 300.0, "scale": 0.3},
    "loud": {"rule": lambda signal, action, step: 1e3 * signal * (2 * action - 1), "actions": 2, "random": True},
    "louder": {"rule": lambda signal, action, step: 1e6 * signal * (2 * action - 1), "actions": 2, "random": True},
    "limit": {"rule": lambda signal, action, step: signal > 0, "length": 2, "limited": True, "random": True},
}  # fmt: skip


HIDDEN = "hidden/CartPole-v1"


def register() -> None:
    """Register the probes with gymnasium as probe/constant-v0, with continuous actions as probe/constant-box-v0, and so on, and CartPole-v1
    without its two velocities as hidden/CartPole-v1. Calling it twice is fine."""
    for name, settings in PROBES.items():
        for id, box in ((f"probe/{name}-v0", False), (f"probe/{name}-box-v0", True)):
            if id not in gym.registry:
                gym.register(id, entry_point=Probe, kwargs=settings | {"box": box}, order_enforce=False)
    if HIDDEN not in gym.registry:
        seen = gym.wrappers.TransformObservation.wrapper_spec(
            func=lambda observation: observation[[0, 2]], observation_space=gym.spaces.Box(-np.inf, np.inf, (2,))
        )
        gym.register(HIDDEN, "gymnasium.envs.classic_control:CartPoleEnv", max_episode_steps=500, reward_threshold=475.0,
                     additional_wrappers=(seen,))  # fmt: skip
