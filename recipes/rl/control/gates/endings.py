"""Checks that an episode which ends inside an environment is reported as ended. A truncated one is bootstrapped, as if it went on."""

import contextlib
import time
from collections.abc import Sequence

import gymnasium as gym
from torch import Tensor
from trainworthy.core.base import seeds
from trainworthy.recipes.rl.control.data.environments import blamed, make

ENOUGH, EPISODES = 3, 8  # ends that are needed, and at most
STEPS, SECONDS = 1000, 2.0


def layers(env: gym.Env) -> list[gym.Env]:
    """Return the environment and its wrappers, innermost first."""
    found = [env]
    while isinstance(found[-1], gym.Wrapper):
        found.append(found[-1].env)
    return found[::-1]


def played(env: gym.Env, seed: int) -> list[str]:
    """Play random actions; return for each `terminated` of the environment inside the wrapper that made a truncation of it, or "" if none
    did."""
    chain = layers(env)
    ends: dict[int, tuple[bool, bool]] = {}

    def record(i: int, step):
        def observed(action):
            answer = step(action)
            ends[i] = bool(answer[2]), bool(answer[3])
            return answer

        return observed

    for i, layer in enumerate(chain):
        layer.step = record(i, layer.step)
    found, began = [], time.monotonic()
    env.action_space.seed(seed)
    env.reset(seed=seed)
    for _ in range(STEPS):
        env.step(env.action_space.sample())
        ends_at = [ends.get(i, (False, False)) for i in range(len(chain))]
        if any(terminated for terminated, _ in ends_at):
            outside = [type(w).__name__ for w, one, inner in zip(chain[1:], ends_at[1:], ends_at[:-1], strict=True)
                       if inner[0] and one == (False, True)]  # fmt: skip
            found.append(outside[0] if outside and ends_at[-1] == (False, True) else "")
        if len(found) == EPISODES:
            break
        if any(ends_at[-1]):
            env.reset()
        ends.clear()
        if time.monotonic() - began > SECONDS:
            break
    return found


def as_truncations(name: str, stack: int, ended: Sequence[dict[str, Tensor]], seed: int) -> tuple[str, str]:
    """Return (fault or "", remark or "") on the steps `ended` of random actions. An environment of which one episode was reported as
    terminated is not played again."""
    terminated, truncated = (sum(int(step[k].sum()) for step in ended) for k in ("terminated", "truncated"))
    if terminated or not truncated:
        return "", ""
    with contextlib.closing(make(name, stack)) as env, blamed(name):
        found = played(env, seeds.derive(seed, "endings"))
    if len(found) >= ENOUGH and all(found):
        return (
            f"{len(found)} of {len(found)} times the environment inside reports `terminated`, {found[0]} reports `truncated` instead",
            "",
        )
    return "", "all as truncated"
