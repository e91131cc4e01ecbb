"""Whole episodes: playing them, their metrics, and the return of random actions."""

import contextlib
import functools
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from trainworthy.core.base import seeds
from trainworthy.recipes.rl.control.data import arrays
from trainworthy.recipes.rl.control.data.environments import (
    Episodes,
    blamed,
    check_length,
    draw,
    first_action,
    make,
    side_by_side,
)


@torch.no_grad()
def play(name: str, starts: Tensor, act: Callable[[Tensor], Tensor], *, stack: int = 1) -> tuple[Tensor, list[Tensor]]:
    """One whole episode from each of the seeds `starts` (n,): (returns (n,), observations (length, n_obs) of each).
    `act` maps observations (n, n_obs) to actions (n,) or (n, n_act); ignore the rows of episodes that have ended."""
    n, act = len(starts), anew(act)
    with contextlib.closing(side_by_side(name, n, stack)) as vector:
        first = first_action(vector.single_action_space)
        with blamed(name):
            observation, _ = vector.reset(seed=starts.tolist())
        returns, running, seen = np.zeros(n), np.ones(n, bool), []
        reward, terminated, truncated = np.zeros(n), np.zeros(n, bool), np.zeros(n, bool)
        while running.any():
            check_length(name, len(seen))
            seen.append((torch.from_numpy(observation).float(), torch.from_numpy(running.copy())))
            chosen = act(seen[-1][0]).cpu().numpy() + first
            with blamed(name):
                if isinstance(vector, arrays.CartPoles):
                    observation, reward, terminated, truncated, _ = vector.step(chosen)
                else:  # those still running alone: the longest of a hundred episodes may be many times their mean
                    observation = observation.copy()
                    for i in np.flatnonzero(running):
                        observation[i], reward[i], terminated[i], truncated[i], _ = vector.envs[i].step(chosen[i])
            returns += reward * running
            running &= ~(terminated | truncated)
    alive = torch.stack([r for _, r in seen])  # (longest, n)
    rows = torch.stack([o for o, _ in seen])
    return torch.from_numpy(returns).float(), [rows[alive[:, i], i] for i in range(n)]


def anew(act: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return `act` for a new episode. A recurrent policy starts with an empty state."""
    return act.begin() if hasattr(act, "begin") else act


def metrics(returned: Tensor, solved: float) -> dict[str, float]:
    """The metrics of whole episodes that earned `returned` (n,); from a return of `solved` on, one counts as solved (infinite:
    unknown)."""
    share = {"solved_share": (returned >= solved).float().mean().item()} if math.isfinite(solved) else {}
    return {"return": returned.mean().item(), "return_sd": returned.std(correction=0).item(),
            "worst_return": returned.min().item(), **share}  # fmt: skip


@functools.cache
def at_random(name: str, episodes: int) -> float:
    """Return the mean return of uniformly random actions over the episodes of an evaluation."""
    with contextlib.closing(make(name)) as env:
        space = env.action_space
    draws = torch.Generator().manual_seed(seeds.derive("random policy"))
    returns, _ = play(
        name, Episodes(name, episodes).starts, lambda observation: draw(space, (len(observation),), draws)
    )
    return returns.mean().item()
