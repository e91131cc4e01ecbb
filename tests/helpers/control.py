"""What tests of several control recipes do alike."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from trainworthy.recipes.rl.control.data import environments

from tests.helpers.commands import losses


def mean_return(env: gym.Env, act: Callable[[torch.Tensor], Any], episodes: int = 6) -> float:
    """Of the evaluation's own episodes, played with gymnasium alone: `act` takes an observation (1, n_obs)."""
    returns = []
    for i in range(episodes):
        observation, _ = env.reset(seed=environments.Episodes(env.spec.id, episodes).get(i, None)["seed"].item())
        total, over = 0.0, False
        while not over:
            observation, reward, terminated, truncated, _ = env.step(
                act(torch.from_numpy(np.asarray(observation))[None])
            )
            total, over = total + reward, terminated or truncated
        returns.append(total)
    return sum(returns) / episodes


def two_like_one(launch: Callable, tmp_path: Path, *argv: str, within: float) -> None:
    """One process and two log the same losses, but for rounding."""
    one, two = (tmp_path / name for name in ("one", "two"))
    for cwd in (one, two):
        cwd.mkdir()
    first, second = launch(*argv, cwd=one), launch(*argv, "-n", "2", cwd=two)
    assert first.returncode == second.returncode == 0, first.shown + second.shown
    for a, b in zip(losses(first.folder()), losses(second.folder()), strict=True):
        assert math.isclose(a, b, rel_tol=within), (a, b)
