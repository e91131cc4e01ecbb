"""Several copies of one gymnasium environment. Every episode depends only on its seed and its actions.

Autoreset is off: `step` returns the true last observation of an episode, and the next episode starts from a seed derived here. So no
reset observation needs a mask, and a truncated episode can be bootstrapped. A checkpoint stores the seed of the current episode and its
actions so far, because the state of many environments (box2d, MuJoCo) cannot be read.
"""

import contextlib
import difflib
import functools
import math
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from torch import Tensor
from trainworthy.core.base import seeds
from trainworthy.core.base.errors import Stop, UserError
from trainworthy.core.recipe.stage import Data, Expect, Field
from trainworthy.recipes.rl.control.data import arrays, probes

CEILINGS = {"CartPole-v1": 500.0, "CartPole-v0": 200.0, probes.HIDDEN: 500.0, "Pendulum-v1": 0.0}
"""Best possible returns. Other environments use the return at which gymnasium calls them solved."""
BEST_KNOWN = {"CartPole-v1": "500: the pole is up until the time limit"}


def make(name: str, stack: int = 1, **settings: Any) -> gym.Env:
    """Return one environment. Its observations are the last `stack` of an episode, flat, oldest first; at the start the first one is
    repeated. Continuous actions are in [-1, 1]. Raises UserError if it cannot be made."""
    probes.register()
    if ":" in name and (here := os.getcwd()) not in sys.path:
        sys.path.append(here)  # its module may be in the working directory; appended last, so that it shadows nothing
    if stack < 1:
        raise UserError(
            "nothing would be observed", got=f"--frame-stack {stack}", needed="1 (the newest observation) or more"
        )
    try:
        env = gym.make(name, disable_env_checker=True, **settings)
    except gym.error.DependencyNotInstalled as error:
        raise UserError(f"the environment '{name}' needs a package that is not installed", got=error) from None
    except ModuleNotFoundError as error:
        raise UserError(f"the module of '{name}' cannot be imported", got=str(error).splitlines()[0],
                        needed="a module in this folder or on PYTHONPATH that calls gymnasium.register",
                        cause="another name or folder, or a package that the module itself imports") from None  # fmt: skip
    except (gym.error.Error, ImportError) as error:
        module, colon, own = name.rpartition(":")
        found = (
            [k for k, spec in gym.registry.items() if "probe/" not in k and _defined_in(spec, module)] if module else []
        )
        found = found or [k for k in gym.registry if "probe/" not in k]
        near = [module + colon + k for k in difflib.get_close_matches(own, found, n=3, cutoff=0.4)]
        if isinstance(getattr(sys.modules.get(module), own, None), type):
            raise UserError(f"'{own}' is a class of {module}, not a registered environment", needed="its id",
                            cause="an id also holds the time limit, and makes the environment again in every process",
                            next=f"at the end of {module}: gymnasium.register('{own}-v0', entry_point='{name}', max_episode_steps=N)\n"
                            f"then --env {module}:{own}-v0") from None  # fmt: skip
        raise UserError(f"gymnasium knows no environment '{name}'", got=str(error).splitlines()[0],
                        needed=f"{', '.join(near) or 'the id of a registered environment'}; of your own: module:Name-v0",
                        next=f"python -c 'import gymnasium{f', {module}' * bool(module)}; gymnasium.pprint_registry()'") from None  # fmt: skip
    except Stop:  # a signal arrived meanwhile
        raise
    except Exception as error:  # the environment's own code
        raise UserError(
            f"the environment '{name}' cannot be made", got=f"{type(error).__name__}: {error}", cause=raised_at(error)
        ) from None
    given, space = env.observation_space, env.action_space
    if stack > 1 or not isinstance(given, gym.spaces.Box) or len(given.shape) != 1:
        # FlattenObservation also copies: some environments return the same array at every step.
        env = gym.wrappers.FlattenObservation(env)
    if stack > 1:
        env = gym.wrappers.FlattenObservation(gym.wrappers.FrameStackObservation(env, stack, padding_type="reset"))
    if not isinstance(space, gym.spaces.Box):
        return env
    if len(space.shape) != 1 or not np.isfinite([space.low, space.high]).all():
        raise UserError(f"the actions of '{name}' cannot be scaled", got=f"{space}", needed="a vector of finite range")
    return gym.wrappers.RescaleAction(env, np.float32(-1), np.float32(1))


RECIPES = {gym.spaces.Discrete: "rl/ppo or rl/dqn", gym.spaces.Box: "rl/ppo or rl/sac"}
"""Recipes for each action space."""
LONGEST = 50_000
"""Steps of one evaluation episode, where the environment has no time limit of its own."""
MEND = "  next:         fix it, then `trainworthy resume` the run folder (from its newest checkpoint), or run again"


def _defined_in(spec: Any, module: str) -> bool:
    """Return whether an environment's class is of a module or of its package."""
    where = spec.entry_point if isinstance(spec.entry_point, str) else getattr(spec.entry_point, "__module__", "")
    return where.split(":")[0].split(".")[0] == module.split(".")[0]


def _instead(space: gym.Space) -> str:
    """Return what to do about actions that no recipe supports."""
    if not isinstance(space, gym.spaces.MultiDiscrete | gym.spaces.MultiBinary):
        return "no recipe supports these actions"
    n = space.nvec.flatten().tolist() if isinstance(space, gym.spaces.MultiDiscrete) else [2] * math.prod(space.shape)
    return (f"number the combinations in the environment: action_space = Discrete({math.prod(n):,}),\n"
            f"and in step(): action = numpy.unravel_index(action, {n})")  # fmt: skip


def sizes(name: str, *actions: type[gym.Space], stack: int = 1) -> tuple[int, int, type[gym.Space]]:
    """Return (length of an observation, number of actions or, for a Box, length of an action, type of the action space). `actions`: the
    supported types."""
    with contextlib.closing(make(name, stack)) as env:
        space = env.unwrapped.action_space
        if not isinstance(space, actions):
            known = RECIPES.get(type(space))
            raise UserError(f"this policy cannot act in '{name}'", got=f"{space}",
                            needed=f"a {' or '.join(a.__name__ for a in actions)} action space",
                            next=f"use {known} for these actions" if known else _instead(space))  # fmt: skip
        kind, needed = type(space), env.observation_space.shape
        for method, seen in _tried(name, env).items():
            if seen != needed:
                raise UserError(f"the observations of '{name}' do not match its observation_space", got=f"shape {seen}",
                                needed=f"shape {needed}", cause=f"its observation_space, or what its {method}() returns")  # fmt: skip
        return (
            math.prod(env.observation_space.shape),
            int(space.n) if kind is gym.spaces.Discrete else len(space.low),
            kind,
        )


def _tried(name: str, env: gym.Env) -> dict[str, tuple[int, ...]]:
    """Reset and step an environment once, before anything is trained. Return {method: shape of the observation that it gave}."""
    try:
        first = env.reset(seed=0)
        if not (isinstance(first, tuple) and len(first) == 2 and isinstance(first[1], dict)):
            raise UserError(f"reset() of '{name}' does not return two values", got=f"{type(first).__name__} of shape {np.shape(first)}"
                            if not isinstance(first, tuple) else f"{len(first)} values", needed="an observation and a dictionary",
                            cause="an environment written for gym, whose reset() returns the observation alone")  # fmt: skip
        env.action_space.seed(0)
        observation, reward, *_ = env.step(env.action_space.sample())
    except Stop:
        raise
    except Exception as error:
        raise UserError(f"the environment '{name}' raised {type(error).__name__}: {error}", got=f"at {raised_at(error)}",
                        cause=_old(error), next="fix it, then the same command again") from None  # fmt: skip
    if np.size(reward) != 1:  # numpy takes an array of one number as that number
        raise UserError(
            f"the reward of '{name}' is no single number",
            got=f"shape {np.shape(reward)}",
            needed="a number: float(reward)",
        )
    return {"reset": np.shape(first[0]), "step": np.shape(observation)}


def _old(error: Exception) -> str:
    """Return the likely cause of an error of environments that were written for gym; empty if it is another error."""
    known = {
        "not enough values to unpack (expected 5, got 4)": "step() returns four values, as in gym; gymnasium's returns observation, "
        "reward, terminated, truncated, info",
        "reset() got an unexpected keyword argument": "reset() without `seed` and `options`; gymnasium's is reset(self, *, seed=None, "
        "options=None)",
    }
    return next((cause for text, cause in known.items() if text in str(error)), "")


def side_by_side(name: str, n: int, stack: int = 1) -> VectorEnv:
    """Return `n` copies, autoreset off: computed in one array if that gives the same results, else one after another."""
    if stack == 1 and arrays.known(name):
        return arrays.CartPoles(n, make(name))
    return SyncVectorEnv([lambda: make(name, stack)] * n, autoreset_mode=AutoresetMode.DISABLED)


def seen(n_obs: int, stack: int) -> str:
    """Return the description of the input for an export's config."""
    last = f"the last {stack} observations, oldest first, an episode's first one repeated until there are as many"
    return f"float32 (B, {n_obs}): {last if stack > 1 else 'observations as the environment gives them'}"


def first_action(space: gym.Space) -> int:
    """Return the number of the first discrete action."""
    return int(space.start) if isinstance(space, gym.spaces.Discrete) else 0


@contextlib.contextmanager
def blamed(name: str) -> Iterator[None]:
    """Turn an exception of an environment into a Stop that names it. Earlier checkpoints stay complete."""
    try:
        yield
    except Stop:  # a signal that arrived while the environment computed is not its error
        raise
    except Exception as error:
        cause = f"  likely cause: {old}\n" if (old := _old(error)) else ""
        raise Stop(f"the environment '{name}' raised {type(error).__name__}: {error}\n"
                   f"  at:           {raised_at(error)}\n{cause}{MEND}") from None  # fmt: skip


def raised_at(error: Exception) -> str:
    """Return file:line of an exception."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}:{frame.lineno}"


def check_length(name: str, steps: int) -> None:
    """Raise Stop if an evaluation of an environment without a time limit has taken too many steps: it may never end."""
    if steps >= LONGEST and gym.spec(name.split(":")[-1]).max_episode_steps is None:
        raise Stop(f"an episode of '{name}' has not ended after {steps:,} steps\n"
                   "  likely cause: it has no time limit, and this policy never reaches an end\n"
                   "  next:         gymnasium.register(..., max_episode_steps=1000), then run again")  # fmt: skip


def limits(name: str) -> tuple[float, float]:
    """Return (return at which it counts as solved, best possible return or the former); inf if unknown."""
    with contextlib.closing(make(name)) as env:
        solved = env.spec.reward_threshold
    solved = float("inf") if solved is None else float(solved)
    return solved, CEILINGS.get(name, solved)


def expect(name: str, *small_terms: str) -> Expect:
    """Return the expectations that hold for every policy in environment `name`."""
    return Expect(
        loss_may_rise="its targets move with the policy", small_terms=small_terms, nondeterministic=own_randomness(name)
    )


@functools.cache
def own_randomness(name: str, steps: int = 20) -> str:
    """Return a sentence if the same seed and actions give different observations, else ""."""
    seen = []
    for _ in range(2):
        with contextlib.closing(make(name)) as env, blamed(name):
            env.action_space.seed(0)
            seen.append([env.reset(seed=0)[0]])
            while len(seen[-1]) <= steps:
                observation, _, terminated, truncated, _ = env.step(env.action_space.sample())
                seen[-1].append(observation)
                if terminated or truncated:
                    break
    alike = len(seen[0]) == len(seen[1]) and all(map(np.array_equal, *seen))
    return "" if alike else f"'{name}' does not repeat itself under one seed (see `environments`)"


class Environments:
    """`n` environments, split over the processes. Observations are (n_mine, n_obs): the last `stack` of the running episode."""

    def __init__(self, name: str, n: int, *, seed: int, stack: int = 1, rank: int = 0, world: int = 1):
        self.name, self.n, self.seed, self.world = name, n, seed, world
        self.mine = range(rank * n // world, (rank + 1) * n // world)
        self.vector = side_by_side(name, len(self.mine), stack)
        self.first_action = first_action(self.vector.single_action_space)
        self.inner = self.vector.envs[0].unwrapped.action_space  # without wrappers
        self.low, self.high = (
            getattr(self.inner, k).tolist() if hasattr(self.inner, k) else None for k in ("low", "high")
        )
        self.episode = [0] * len(self.mine)  # number of each environment's current episode
        self.actions: list[list[np.ndarray]] = [[] for _ in self.mine]  # since the start of the current episode
        self.returned = np.zeros(len(self.mine))  # sum of rewards since then
        self._reset(np.ones(len(self.mine), bool))

    def _seed(self, i: int) -> int:
        return seeds.derive(self.seed, "episode", self.mine[i], self.episode[i])

    def _reset(self, which: np.ndarray) -> None:
        begun = [self._seed(i) if now else None for i, now in enumerate(which)]
        with blamed(self.name):
            observation, _ = self.vector.reset(seed=begun, options={"reset_mask": which})
        self._validate(observation=observation)
        self.observation = torch.from_numpy(observation).float()

    def _validate(self, **seen: np.ndarray) -> None:
        """Raise Stop for non-finite values: running statistics would never recover."""
        for what, values in seen.items():
            if not np.isfinite(values).all():
                i = int(np.argwhere(~np.isfinite(values))[0][0])
                raise Stop(f"the environment '{self.name}' gave a non-finite {what}: {values[i]}\n"
                           f"  where:        {len(self.actions[i])} steps into the episode with seed {self._seed(i)}\n"
                           f"{MEND}")  # fmt: skip

    def step(self, actions: Tensor) -> dict[str, Tensor]:
        """Take `actions` (n_mine,) or (n_mine, n_act); return reward, next_observation, terminated, truncated and finished.

        At the end of an episode next_observation is its true last one, and `finished` holds its return (else NaN). `self.observation` is
        the one to act on next."""
        chosen = actions.cpu().numpy()
        if not isinstance(self.inner, gym.spaces.Discrete):
            chosen = chosen.clip(-1, 1)  # a Gaussian is unbounded
        for history, action in zip(self.actions, chosen, strict=True):
            history.append(action)
        with blamed(self.name):
            observation, reward, terminated, truncated, _ = self.vector.step(chosen + self.first_action)
        self._validate(observation=observation, reward=reward)
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
        """Return this process's rows, indices into (steps, n_mine), that are among the rows `order` of (steps, n)."""
        if self.world == 1:
            return order
        step, env = order // self.n, order % self.n
        own = (env >= self.mine.start) & (env < self.mine.stop)
        return (step * len(self.mine) + env - self.mine.start)[own]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all environments, so that any number of processes can resume."""
        kind = self.vector.single_action_space.dtype
        parts = [(self.episode, [torch.from_numpy(np.array(a, kind)) for a in self.actions])]
        if self.world > 1:
            own, parts = parts[0], [None] * self.world
            dist.all_gather_object(parts, own)
        return {"episode": [k for one, _ in parts for k in one], "actions": [a for _, some in parts for a in some]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin the running episodes again and replay their actions."""
        if len(state["episode"]) != self.n:
            raise UserError(
                "the checkpoint holds another number of environments", got=len(state["episode"]), needed=self.n
            )
        self.episode = [state["episode"][i] for i in self.mine]
        self.actions = [[*state["actions"][i].numpy()] for i in self.mine]
        self._reset(np.ones(len(self.mine), bool))
        array = isinstance(self.vector, arrays.CartPoles)
        for i, env in enumerate(self.vector.envs):
            if array:
                env.reset(seed=self._seed(i))
            self.returned[i] = 0.0
            for action in self.actions[i]:
                observation, reward, *_ = env.step(action + self.first_action)
                self.returned[i] += reward
                self.observation[i] = torch.as_tensor(observation).float()  # a list where the environment gives one
            if array:
                self.vector.put(i, env, len(self.actions[i]))


class Episodes(Data):
    """Episodes of the environment `name` to evaluate on, each given by its seed; the same for every run. `purpose` draws the
    seeds: "evaluation" for the choice of weights and settings, "test" for the number reported at the end. The name of the
    environment is a part of the data, so that a band of healthy runs is not drawn over another environment's."""

    def __init__(self, name: str, n: int, purpose: str = "evaluation"):
        self.name, self.n, self.purpose = name, n, purpose
        self.fields = {"environment": Field("source"), "seed": Field("source")}

    def __len__(self) -> int:
        return self.n

    def get(self, index: int, generator: torch.Generator | None) -> dict[str, Any]:
        return {"environment": self.name, "seed": torch.tensor(seeds.derive(self.purpose, index))}

    @property
    def starts(self) -> Tensor:
        """All seeds (n,)."""
        return torch.stack([self.get(i, None)["seed"] for i in range(self.n)])


def draw(space: gym.Space, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Actions (*size,) or (*size, n_act), drawn uniformly."""
    if isinstance(space, gym.spaces.Discrete):
        return torch.randint(int(space.n), size, generator=generator)
    return 2 * torch.rand(*size, *space.shape, generator=generator) - 1
