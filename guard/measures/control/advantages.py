"""Finds advantages that run on over the end of an episode, and critics that are subtracted and never learn.

The weight of an action in a policy's loss is its advantage, scaled and shifted. Generalised advantages, returns of n steps and temporal
differences are all the same sum of five numbers: the reward, the value of this state and of the next one, the advantage of the next step, a
constant. Their factors are fitted on the steps that did not end an episode, and must fit exactly. If the steps that did end one follow the
same sum, the next episode's value and advantage were counted in. A time limit (truncation) is no end.
"""

from typing import Any

import torch
from torch import Tensor
from trainworthy.guard.hooks.trees import floats
from trainworthy.guard.measures.control.policy_rewards import Credit

ROWS = 4096
FITTED = 12  # steps within episodes that the factors are fitted on
EXACT = 3e-4  # of the spread of the weights
CLEAR = 0.05  # the same, of what the next step adds, where it is looked for
BASED = 3e-3  # the same, of what is left without the critic's values
BATCH = 16  # actions of one log_prob() from which on its batch may be normalised on its own
Place = tuple[int, int, int]


class Values:
    """What each model said of each state, before that state's action was learnt from: one number, as a critic's."""

    def __init__(self) -> None:
        self.of: dict[int, dict[Place, float]] = {}

    def root(self, module: Any, given: Tensor, out: Any, credit: Credit) -> None:
        """Note a model's call."""
        if not credit.where or not given.is_floating_point() or not given.dim():
            return
        rows = given.detach().float().cpu().numpy()
        rows = rows.reshape(-1, rows.shape[-1]) if rows.ndim > 1 else rows[None]
        found = [y for y in floats(out) if y.numel() == len(rows)]
        mine = self.of.setdefault(id(module), {}) if len(found) == 1 else {}
        if len(found) != 1 or len(mine) >= ROWS:
            return
        for place, value in zip(credit.places(rows), found[0].detach().flatten().tolist(), strict=True):
            if place is not None and place not in credit.known:
                mine[place] = value


def groups(credit: Credit) -> list[dict[Place, float]]:
    """Return the weights of actions that have one scale: those of all calls before one update, or of the first large batch after a
    rollout (later ones are weighed by a ratio)."""
    found: list[dict[Place, float]] = []
    counts: list[int] = []
    for count, rows in credit.batches:
        large = len(rows) >= BATCH
        if counts and counts[-1] == count:
            if not large:
                found[-1].update(rows)
            continue
        counts.append(count)
        found.append(dict(rows))
    return found


def steps(
    credit: Credit, weights: dict[Place, float], values: dict[Place, float]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the rows of the sum (S, 5), the weights (S,), which steps ended an episode, and which were cut by a time limit."""
    rows, wanted, ended, cut = [], [], [], []
    for (env, t, row), weight in weights.items():
        after = (env, t + 1, row)
        if after not in weights or t >= len(credit.rewards.get(env, ())):
            continue
        here, then = values.get((env, t, row), 0.0), values.get(after, 0.0)
        if values and ((env, t, row) not in values or after not in values):
            continue
        reward = credit.rewards[env][t]
        rows.append([float(reward[min(row, len(reward) - 1)]), here, then, weights[after], 1.0])
        wanted.append(weight)
        over = bool(credit.terminated[env][t][min(row, len(reward) - 1)])
        ended.append(over)
        cut.append(bool(credit.ends[env][t][min(row, len(reward) - 1)]) and not over)
    return (torch.tensor(rows, dtype=torch.float64).reshape(-1, 5), torch.tensor(wanted, dtype=torch.float64),
            torch.tensor(ended, dtype=torch.bool), torch.tensor(cut, dtype=torch.bool))  # fmt: skip


def residuals(columns: Tensor, wanted: Tensor, fitted: Tensor) -> tuple[Tensor, Tensor]:
    """Return what the sum leaves of each weight, as a share of the fitted weights' spread, and the factors."""
    scale = columns[fitted].abs().amax(0).clamp_min(1e-12)
    factors = torch.linalg.lstsq((columns / scale)[fitted], wanted[fitted, None], driver="gelsd").solution[:, 0] / scale
    return (columns @ factors - wanted) / wanted[fitted].std().clamp_min(1e-12), factors


class Sums:
    """The steps of all updates whose weights are such a sum."""

    def __init__(self, credit: Credit, values: Values):
        self.exact = self.on = self.masked = self.based = 0
        for weights in groups(credit):
            for mine in (*values.of.values(), {}):
                if self._read(*steps(credit, weights, mine), critic=bool(mine)):
                    break

    def _read(self, columns: Tensor, wanted: Tensor, ended: Tensor, cut: Tensor, *, critic: bool) -> bool:
        inner = ~ended & ~cut
        if int(inner.sum()) < FITTED or float(wanted[inner].std()) == 0:
            return False
        columns = columns if critic else columns[:, [0, 3, 4]]
        rest, factors = residuals(columns, wanted, inner)
        if float(rest[inner].abs().max()) > EXACT:
            return False
        self.exact += int(inner.sum())
        if critic:
            without, _ = residuals(columns[:, [0, 3, 4]], wanted, inner)
            self.based += float(without[inner].std()) > BASED
        # the next step's share of the weight must be visible, else both sums are the same
        later = (columns[:, 2:4] @ factors[2:4] if critic else columns[:, 1] * factors[1]) / wanted[inner].std()
        seen = ended & (later.abs() > CLEAR)
        self.on += int((seen & (rest.abs() < 2 * EXACT)).sum())
        self.masked += int((seen & (rest.abs() >= 2 * EXACT)).sum())
        return True
