"""Environments that fail in the middle of a rollout, in the way that the variable FAILS names (unset: they are healthy).

`--env tests.helpers.failing:CartPole-v0` and `tests.helpers.failing:Pendulum-v0`. No way to fail is met before every copy has
made enough steps for a checkpoint or two.
"""

import os
import signal

import gymnasium as gym
import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from gymnasium.envs.classic_control.pendulum import PendulumEnv

HEALTHY = int(os.environ.get("HEALTHY_STEPS", "600"))  # of all copies in this process
MADE = [0]
WIND = np.random.default_rng()  # of which no reset seeds anything


def failing(made: type[gym.Env]) -> type[gym.Env]:
    """`made`, which fails as asked."""

    class Failing(made):
        def step(self, action):
            observation, reward, *ends = super().step(action)
            MADE[0] += 1
            how = os.environ.get("FAILS") if MADE[0] > HEALTHY else None
            if how == "raises":
                raise RuntimeError("the motor is off")
            if how == "signal" and signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:  # once core listens
                os.kill(os.getpid(), signal.SIGTERM)
            if how == "shape":
                observation = observation[:-1]
            if how == "observation":
                observation = np.full_like(observation, np.nan)
            if how == "wind":
                observation = observation + WIND.normal(0, 0.01, observation.shape).astype(observation.dtype)
            return observation, float("nan") if how == "reward" else reward, *ends

    return Failing


for name, made, steps in (("CartPole-v0", CartPoleEnv, 500), ("Pendulum-v0", PendulumEnv, 200)):
    gym.registry.pop(f"failing/{name}", None)
    gym.register(f"failing/{name}", entry_point=failing(made), max_episode_steps=steps)
