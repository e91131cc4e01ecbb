"""Checks that environments start from different seeds, given the number of start states: with few, some coincide by
chance."""

import math
import time

import numpy as np
import torch
from torch import Tensor
from trainworthy.core.base import seeds
from trainworthy.recipes.rl.control.data.environments import Environments

RESETS, SECONDS = 256, 2.0  # resets, and seconds at most, to estimate how often two starts are equal
CHANCE = 1e-4  # probability of a false alarm
EPISODES = 32


def alike(envs: Environments) -> float:
    """Return the probability that two episodes start from the same observation, estimated from independent resets."""
    env, seen, began = envs.vector.envs[0], {}, time.monotonic()
    for i in range(RESETS):
        start = np.asarray(env.reset(seed=seeds.derive("start", i))[0]).tobytes()
        seen[start] = seen.get(start, 0) + 1
        if time.monotonic() - began > SECONDS and i >= 31:
            break
    n = sum(seen.values())
    return sum(k * (k - 1) for k in seen.values()) / (n * (n - 1))


def starts(envs: Environments, episode: int) -> Tensor:
    """Return the first observation of the given episode of each environment, (n_mine, n_obs)."""
    envs.load_state_dict({"episode": [episode] * envs.n, "actions": [torch.zeros(0)] * envs.n})
    return envs.observation.clone()


def at_least(pairs: int, expected: float) -> float:
    """Return the probability of at least `pairs` matches if `expected` are (Poisson, since pairs are nearly independent)."""
    return 1.0 - sum(math.exp(-expected) * expected**k / math.factorial(k) for k in range(min(pairs, 100)))


def matches(rows: Tensor) -> Tensor:
    """Return which pairs start from the same observation, (n, n) bool."""
    return (rows[:, None] == rows[None]).flatten(2).all(-1).triu(1)


def shared(envs: Environments) -> tuple[str, str]:
    """Return (fault or "", remark or "") on the seeds of `envs`. Two may start one episode alike by chance, but not every one."""
    n, chance = len(envs.mine), alike(envs)
    pairs = n * (n - 1) // 2
    if chance >= 1 or not pairs:
        return "", "every episode begins alike" if chance >= 1 else ""
    states = f"about {1 / chance:,.0f} start states" if chance else f"more than {RESETS * RESETS // 2:,} start states"
    first = matches(starts(envs, 0))
    met, left = int(first.sum()), first
    needed = 1 if not chance else min(EPISODES, max(2, math.ceil(math.log(CHANCE / pairs) / math.log(chance))))
    for k in range(1, needed):
        left = left & matches(starts(envs, k))
    lucky = at_least(met, pairs * max(chance, 1.0 / (RESETS * RESETS)))
    if met and (bool(left.any()) or lucky < CHANCE):
        every = bool(left.any()) and needed > 1
        count, lucky = (int(left.sum()), pairs * chance**needed) if every else (met, lucky)
        at = f"in each of {needed} episodes" if every else "in their first episode"
        return (
            f"{count} of {pairs} pairs of environments start from the same observation {at}. This environment has {states}: "
            f"by chance that happens in fewer than {max(1e-6, lucky):.1g} of runs"
        ), ""
    if not met:
        return "", ""
    return "", (
        f"{met} of {pairs} pairs of environments start from the same observation. This environment has {states}, so that many are "
        f"expected in {lucky:.0%} of runs: no fault"
    )
