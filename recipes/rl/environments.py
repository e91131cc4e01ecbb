"""Copies of one gymnasium environment side by side, such that every episode is a function of its seed and its actions.

Autoreset is off: `step` hands over the true last observation of an episode, and the next one begins from a seed of ours. So there
is no observation of a reset to be masked, a value may be bootstrapped where a time limit cuts, and environments that keep their
state to themselves (box2d, MuJoCo) are saved as what they are made of: the seed of the running episode and the actions since.
"""

import contextlib
import difflib
import functools
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor

from core import seeds
from core.errors import UserError
from core.stage import Data, Field
from recipes.rl import probes

CEILINGS = {"CartPole-v1": 500.0, "CartPole-v0": 200.0}
"""Returns that cannot be beaten; elsewhere the return at which the environment's authors call it solved."""
BEST_KNOWN = {"CartPole-v1": "500: the pole stands until the time limit"}


def make(name: str) -> gym.Env:
    """One environment with flat observations and discrete actions; whatever is wrong with its name, in one message."""
    probes.register()
    try:
        env = gym.make(name, disable_env_checker=True)
    except gym.error.DependencyNotInstalled as error:
        raise UserError(f"the environment '{name}' needs a package that is not installed", got=error) from None
    except (gym.error.Error, ImportError) as error:
        near = difflib.get_close_matches(name, [k for k in gym.registry if "probe/" not in k], n=3, cutoff=0.4)
        raise UserError(f"gymnasium knows no environment '{name}'", got=str(error).splitlines()[0],
                        needed="one of: " + ", ".join(near) if near else "the id of a registered environment",
                        next="python -c 'import gymnasium; gymnasium.pprint_registry()'") from None  # fmt: skip
    if not isinstance(env.action_space, gym.spaces.Discrete):
        raise UserError(f"'{name}' takes actions that this policy does not give", got=f"{env.action_space}",
                        needed="a Discrete action space: the policy chooses one of n actions",
                        next="an environment with discrete actions, such as --env CartPole-v1") from None  # fmt: skip
    return gym.wrappers.FlattenObservation(env)


def sizes(name: str) -> tuple[int, int]:
    """(numbers in an observation, actions to choose from)."""
    with contextlib.closing(make(name)) as env:
        return int(np.prod(env.observation_space.shape)), int(env.action_space.n)


def limits(name: str) -> tuple[float, float]:
    """(return at which it counts as solved, return that cannot be beaten or nobody asks for more than); infinite if unknown."""
    with contextlib.closing(make(name)) as env:
        solved = env.spec.reward_threshold
    solved = float("inf") if solved is None else float(solved)
    return solved, CEILINGS.get(name, solved)


class Environments:
    """`n` environments over all processes, this one's part of them stepped together. Observations are (n_mine, n_obs)."""

    def __init__(self, name: str, n: int, *, seed: int, rank: int = 0, world: int = 1):
        self.name, self.n, self.seed, self.world = name, n, seed, world
        self.mine = range(rank * n // world, (rank + 1) * n // world)
        self.vector = SyncVectorEnv([lambda: make(name)] * len(self.mine), autoreset_mode=AutoresetMode.DISABLED)
        self.first_action = int(self.vector.single_action_space.start)
        self.episode = [0] * len(self.mine)  # how many each has begun before its present one
        self.actions: list[list[int]] = [[] for _ in self.mine]  # since the present episode began
        self.returned = np.zeros(len(self.mine))  # reward since then
        self._reset(np.ones(len(self.mine), bool))

    def _seeds(self) -> list[int]:
        return [seeds.derive(self.seed, "episode", i, k) for i, k in zip(self.mine, self.episode, strict=True)]

    def _reset(self, which: np.ndarray) -> None:
        observation, _ = self.vector.reset(seed=self._seeds(), options={"reset_mask": which})
        self.observation = torch.from_numpy(observation).float()

    def step(self, actions: Tensor) -> dict[str, Tensor]:
        """What followed `actions` (n_mine,): reward, next_observation (the true one, also where an episode ended), terminated,
        truncated; where one ended, `finished` holds its return, elsewhere NaN. `observation` is then what to act on next."""
        chosen = actions.cpu().numpy()
        for history, action in zip(self.actions, chosen.tolist(), strict=True):
            history.append(action)
        observation, reward, terminated, truncated, _ = self.vector.step(chosen + self.first_action)
        self.returned += reward
        done = terminated | truncated
        followed = {"reward": torch.from_numpy(reward).float(), "next_observation": torch.from_numpy(observation).float(),
                    "terminated": torch.from_numpy(terminated), "truncated": torch.from_numpy(truncated),
                    "finished": torch.from_numpy(np.where(done, self.returned, np.nan)).float()}  # fmt: skip
        self.observation = followed["next_observation"]
        if done.any():
            for i in np.flatnonzero(done).tolist():
                self.episode[i], self.actions[i], self.returned[i] = self.episode[i] + 1, [], 0.0
            self._reset(done)
        return followed

    def rows(self, order: Tensor) -> Tensor:
        """Which of this process's rows, laid out as (steps, n_mine), are among the rows `order` of (steps, n)."""
        step, env = order // self.n, order % self.n
        own = (env >= self.mine.start) & (env < self.mine.stop)
        return (step * len(self.mine) + env - self.mine.start)[own]

    def state_dict(self) -> dict[str, Any]:
        """Of all processes, so that any number of them can go on."""
        parts = [(self.episode, self.actions)]
        if self.world > 1:
            parts = [None] * self.world
            dist.all_gather_object(parts, (self.episode, self.actions))
        return {"episode": [k for one, _ in parts for k in one],
                "actions": [torch.tensor(a, dtype=torch.int32) for _, some in parts for a in some]}  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin the running episodes again and replay their actions."""
        if len(state["episode"]) != self.n:
            raise UserError(
                "the checkpoint holds another number of environments", got=len(state["episode"]), needed=self.n
            )
        self.episode = [state["episode"][i] for i in self.mine]
        self.actions = [state["actions"][i].tolist() for i in self.mine]
        self._reset(np.ones(len(self.mine), bool))
        for i, env in enumerate(self.vector.envs):
            self.returned[i] = 0.0
            for action in self.actions[i]:
                observation, reward, *_ = env.step(action + self.first_action)
                self.returned[i] += reward
                self.observation[i] = torch.from_numpy(observation).float()


class Episodes(Data):
    """Episodes to evaluate on, each given by the seed it begins from; the same for every run."""

    def __init__(self, n: int):
        self.n = n
        self.fields = {"seed": Field("source")}

    def __len__(self) -> int:
        return self.n

    def get(self, index: int, generator: torch.Generator | None) -> dict[str, Tensor]:
        return {"seed": torch.tensor(seeds.derive("evaluation", index))}

    @property
    def starts(self) -> Tensor:
        """All seeds (n,)."""
        return torch.stack([self.get(i, None)["seed"] for i in range(self.n)])


@torch.no_grad()
def play(name: str, starts: Tensor, act: Callable[[Tensor], Tensor]) -> tuple[Tensor, list[Tensor]]:
    """One whole episode from each of the seeds `starts` (n,): (returns (n,), observations (length, n_obs) of each).
    `act` maps observations (n, n_obs) to actions (n,). Episodes that have ended go on unseen until the last one has."""
    n = len(starts)
    with contextlib.closing(SyncVectorEnv([lambda: make(name)] * n, autoreset_mode=AutoresetMode.DISABLED)) as vector:
        first = int(vector.single_action_space.start)
        observation, _ = vector.reset(seed=starts.tolist())
        returns, running, seen = np.zeros(n), np.ones(n, bool), []
        while running.any():
            seen.append((torch.from_numpy(observation).float(), torch.from_numpy(running.copy())))
            observation, reward, terminated, truncated, _ = vector.step(act(seen[-1][0]).cpu().numpy() + first)
            returns += reward * running
            done = terminated | truncated
            running &= ~done
            if done.any():
                observation, _ = vector.reset(seed=starts.tolist(), options={"reset_mask": done})
    alive = torch.stack([r for _, r in seen])  # (longest, n)
    rows = torch.stack([o for o, _ in seen])
    return torch.from_numpy(returns).float(), [rows[alive[:, i], i] for i in range(n)]


@functools.cache
def at_random(name: str, episodes: int) -> float:
    """Mean return of a policy that knows nothing, every action equally likely, over the episodes of an evaluation."""
    _, n_actions = sizes(name)
    draws = torch.Generator().manual_seed(seeds.derive("random policy"))
    starts = Episodes(episodes).starts
    returns, _ = play(name, starts, lambda observation: torch.randint(n_actions, (len(observation),), generator=draws))
    return returns.mean().item()


def trace(observations: Tensor, height: int = 64, width: int = 250) -> Tensor:
    """A picture (height, width) uint8 of one episode: a line for each number of the observation over time, darkest first."""
    length, n = observations.shape
    scaled = observations / observations.abs().amax(0).clamp_min(
        1e-6
    )  # each in [-1, 1] of its own scale, zero in the middle
    x = (torch.arange(length) * (width - 1) // max(length - 1, 1)).long()
    y = ((1 - scaled) / 2 * (height - 1)).round().long()
    picture = torch.full((height, width), 255, dtype=torch.uint8)
    picture[height // 2] = 225
    for i in reversed(range(min(n, 4))):
        picture[y[:, i], x] = 55 * i
    return picture
