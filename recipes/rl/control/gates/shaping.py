"""Rewards that the loop shapes: it adds a function of the step to what the environment returned (a penalty for the distance from the middle,
for large actions, for an early end; Ng 1999). Training targets then fit no definition with the environment's rewards, and are right."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from trainworthy.recipes.rl.control.gates.definitions import Compared
    from trainworthy.recipes.rl.control.gates.recording import Seen

SHAPED = "rewards that the loop shapes"
EXACT = 1e-3  # of the largest difference that is explained
MOST = 12  # numbers in an observation: with more of them there are too few rows


def compared(seen: "Seen", places: list[list[tuple[int, int]]], found: list[float], due: list[list[float]], sums: dict[str, Any],
                 again: Callable[["Seen"], "Compared"], quantity: str) -> "Compared":  # fmt: skip
    """Return the comparison `again` with the rewards that the loop shapes, if only they explain the targets `found` (see `added`);
    nothing if they do not. `sums`: how a target adds up rewards."""
    if "environment's reward" in seen.steps:  # they are shaped already
        return {}
    rows = [(*some[0], f - d[0]) for some, f, d in zip(places, found, due, strict=True) if len(some) == len(d) == 1]
    more = added(seen.steps, rows, **sums)
    if more is None:
        return {}
    reward = seen.steps["reward"]
    steps = seen.steps | {"reward": (reward + more).to(reward.dtype), "environment's reward": reward}
    result = again(replace(seen, steps=steps))
    if result[quantity][0] > 1e-3:
        return {}
    most = more.abs().max().item()
    return {
        f"{SHAPED} by up to {most:.2g} a step, a function of the observation, the action or the end": (0.0, ""),
        **result,
    }


def added(
    steps: dict[str, Tensor], rows: Sequence[tuple[int, int, float]], *, decay: float, over: Tensor, length: int = 0
) -> Tensor | None:
    """Return the reward (steps, environments) that the loop adds to each step, if sums of such rewards explain all `rows` (step,
    environment, target minus what the environment's rewards give): a linear function of the observations, their sizes and squares, the
    action, and of whether the episode ends. `decay`: weight of the next step's reward, to the end of the episode (`over`) or over `length`
    steps. None if it explains nothing, adds one number to every reward, or gives the reward of a neighbouring step, none or twice its own."""
    due = torch.tensor([d for _, _, d in rows], dtype=torch.float64)
    size = due.abs().max().item() if len(due) else 0.0
    if len(rows) < 16 or not size:
        return None
    groups = _features(steps)
    constant, ends = torch.ones_like(over, dtype=torch.float64)[..., None], groups.pop("ends")
    if _fit([constant], rows, due, decay, over, length) is not None:
        return None
    for n in range(len(groups) + 1):
        for some in itertools.combinations(groups.values(), n):
            found = _fit([constant, ends, *some], rows, due, decay, over, length)
            if found is not None:
                return None if _mistaken(steps["reward"] + found, steps["reward"]) else found
    return None


def _features(steps: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return numbers of each step, (steps, environments, n) each."""
    found = {"ends": torch.stack([steps["terminated"], steps["truncated"]], -1).double()}
    for name in ("next_observation", "observation"):
        x = steps[name].double().flatten(2)
        if x.shape[-1] <= MOST:
            found[name] = torch.cat([x, x.abs(), x.square()], -1)
    action = steps["action"].reshape(*steps["reward"].shape, -1)
    if action.is_floating_point():
        a = action.double()
        found["action"] = torch.cat([a, a.abs(), a.square()], -1)
    else:
        found["action"] = torch.nn.functional.one_hot(action.long()).flatten(2).double()
    return found


def _fit(
    parts: list[Tensor], rows: Sequence[tuple[int, int, float]], due: Tensor, decay: float, over: Tensor, length: int
) -> Tensor | None:
    """Return the added rewards of all steps if the differences are exactly sums of a linear function of these parts."""
    each = torch.cat(parts, -1)
    sums = torch.stack([_sum(each, t, i, decay, over, length) for t, i, _ in rows])
    if 4 * each.shape[-1] > 3 * len(rows):  # any numbers would nearly fit
        return None
    weights = torch.linalg.lstsq(sums, due[:, None], driver="gelsd").solution[:, 0]
    exact = (sums @ weights - due).abs().max() <= EXACT * due.abs().max()
    return each @ weights if exact else None


def _sum(each: Tensor, t: int, i: int, decay: float, over: Tensor, length: int) -> Tensor:
    """Return the sum of a step's numbers and of those that follow, as its target adds up rewards."""
    total, weight = torch.zeros_like(each[t, i]), 1.0
    for k in range(t, min(len(each), t + length) if length else len(each)):
        total += weight * each[k, i]
        weight *= decay
        if over[k, i]:
            break
    return total


def _mistaken(shaped: Tensor, reward: Tensor) -> bool:
    """Return whether the shaped rewards, where they differ from the environment's, are those of the step before or after, twice the own, or
    none: a shifted index or a mask at the end of an episode is no shaping."""
    limit = EXACT * reward.abs().max().clamp_min(1e-9)
    others = [torch.zeros_like(reward), 2 * reward, reward.roll(1, 0), reward.roll(-1, 0)]
    changed = (shaped - reward).abs() > limit
    changed[[0, -1]] = False  # they have no neighbour
    return bool(changed.any()) and any(((shaped - o).abs() <= limit)[changed].double().mean() > 0.8 for o in others)
