"""CartPole with all copies in one array: gymnasium's own arithmetic, with the starts and ends of ordinary copies."""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleEnv, CartPoleVectorEnv
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode

ARRAY = f"{CartPoleVectorEnv.__module__}:{CartPoleVectorEnv.__name__}"
ORDINARY = f"{CartPoleEnv.__module__}:{CartPoleEnv.__name__}"


def known(name: str) -> bool:
    """Is `name` the CartPole that these arrays step: gymnasium's, with nothing changed or wrapped around it?"""
    spec = gym.registry.get(name)
    plain = spec is not None and not spec.kwargs and not spec.additional_wrappers
    return plain and (spec.entry_point, spec.vector_entry_point) == (ORDINARY, ARRAY)


class CartPoles(CartPoleVectorEnv):
    """`n` CartPoles of one (4, n) array, bit for bit those of a SyncVectorEnv with autoreset off. gymnasium's class draws all
    beginnings from one generator, so that an episode depends on its neighbours; here each comes from the seed of its episode."""

    metadata = CartPoleVectorEnv.metadata | {"autoreset_mode": AutoresetMode.DISABLED}

    def __init__(self, n: int, ordinary: gym.Env):
        super().__init__(n, max_episode_steps=ordinary.spec.max_episode_steps)
        self.envs = [ordinary] * n  # to replay an episode in
        self.state = np.zeros((4, n))

    def reset(self, *, seed: list[int | None], options: dict[str, Any] | None = None):
        """Begin those of `options["reset_mask"]` (n,), or all."""
        for i in np.flatnonzero((options or {}).get("reset_mask", np.ones(self.num_envs, bool))):
            self.state[:, i] = seeding.np_random(seed[i])[0].uniform(self.low, self.high, 4)
            self.steps[i] = 0
        return self.state.T.astype(np.float32), {}

    def step(self, action: np.ndarray):
        self.prev_done[:] = False  # autoreset is off: an end waits for `reset`
        return super().step(action)

    def put(self, i: int, env: gym.Env, steps: int) -> None:
        """Go on with copy `i` where the ordinary environment `env` stands, `steps` into its episode."""
        self.state[:, i], self.steps[i] = env.unwrapped.state, steps
