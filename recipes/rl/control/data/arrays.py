"""CartPole with all copies in one array. It uses gymnasium's own arithmetic, with the starts and ends of separate environments."""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleEnv, CartPoleVectorEnv
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode

ARRAY = f"{CartPoleVectorEnv.__module__}:{CartPoleVectorEnv.__name__}"
ORDINARY = f"{CartPoleEnv.__module__}:{CartPoleEnv.__name__}"


def known(name: str) -> bool:
    """Return whether `name` is the CartPole that these arrays compute: gymnasium's own, unchanged and without wrappers."""
    spec = gym.registry.get(name)
    plain = spec is not None and not spec.kwargs and not spec.additional_wrappers
    return plain and (spec.entry_point, spec.vector_entry_point) == (ORDINARY, ARRAY)


class CartPoles(CartPoleVectorEnv):
    """`n` CartPoles in one (4, n) array, bit for bit equal to a SyncVectorEnv with autoreset off. gymnasium's array class draws all starts
    from one generator, so that an episode depends on its neighbours; here each start comes from its episode's seed."""

    metadata = CartPoleVectorEnv.metadata | {"autoreset_mode": AutoresetMode.DISABLED}

    def __init__(self, n: int, ordinary: gym.Env):
        super().__init__(n, max_episode_steps=ordinary.spec.max_episode_steps)
        self.envs = [ordinary] * n  # for replaying an episode
        self.state = np.zeros((4, n))

    def reset(self, *, seed: list[int | None], options: dict[str, Any] | None = None):
        """Reset the environments of `options["reset_mask"]` (n,), or all."""
        for i in np.flatnonzero((options or {}).get("reset_mask", np.ones(self.num_envs, bool))):
            self.state[:, i] = seeding.np_random(seed[i])[0].uniform(self.low, self.high, 4)
            self.steps[i] = 0
        return self.state.T.astype(np.float32), {}

    def step(self, action: np.ndarray):
        self.prev_done[:] = False  # autoreset is off: an ended episode waits for `reset`
        return super().step(action)

    def put(self, i: int, env: gym.Env, steps: int) -> None:
        """Continue copy `i` from the state of the ordinary environment `env`, `steps` into its episode."""
        self.state[:, i], self.steps[i] = env.unwrapped.state, steps
