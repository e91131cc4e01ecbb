"""Finds targets that hold the value of the state after the end of an episode: reward + gamma * value without the mask of the ended ones.

The weights of reward and value are fitted on the steps that did not end an episode. They must fit exactly; what they predict for the
steps that did is compared with their targets, with and without the value. A time limit (truncation) is no end: its value may count.
"""

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from trainworthy.core.base.doubles import to_double
from trainworthy.guard.hooks.trees import tensors
from trainworthy.guard.measures.control.policy_rewards import Credit
from trainworthy.guard.measures.models.autograd import nodes

CALLS, ROWS = 256, 16  # losses that are read; rows of a batch, at least
FEWEST = 8  # ended steps
LENGTHS = 3  # of episodes: where all are equally long, a time limit ends them
NODES = 64  # of a graph between a model's output and the value that is compared
EXACT = 1e-3


class Bootstrapped:
    """Counts the ended steps whose targets hold a value, and those whose targets hold none."""

    def __init__(self) -> None:
        self.calls = 0
        self.outputs: deque = deque(maxlen=4)  # a model's first input, its output, the output's node
        self.with_value = self.without = 0
        self.reward_weights: list[float] = []  # of the rewards, in targets that reward and value explain
        self.lengths: set[int] = set()  # of the episodes that ended there

    def root(self, given: Tensor, out: Any, credit: Credit) -> None:
        """Note a model's call on many observations."""
        if not credit.where or self.calls >= CALLS or given.dim() != 2 or len(given) < ROWS:
            return
        found = [y for y in tensors(out) if y.dim() in (1, 2) and len(y) == len(given)]
        self.outputs += [(given.detach(), y.detach(), y.grad_fn) for y in found[:1]]

    def compared(self, prediction: Tensor, target: Tensor, credit: Credit) -> None:
        """Compare the targets of one loss with rewards and values."""
        if not self.outputs or self.calls >= CALLS:
            return
        if target.numel() != len(target) or prediction.numel() != len(target):
            return
        self.calls += 1
        below = set(nodes(prediction.grad_fn, most=NODES, nearest=True))
        states = next((x for x, _, node in reversed(self.outputs) if node is not None and node in below), None)
        if states is None or len(states) != len(target):
            return
        places = credit.places(states.float().cpu().numpy())
        known = [i for i, p in enumerate(places) if p and p[1] < len(credit.rewards.get(p[0], ()))]
        if len(known) < 0.9 * len(places):
            return
        rows = [(places[i][0], places[i][1], places[i][2]) for i in known]  # type: ignore[index]
        reward = torch.tensor([float(credit.rewards[e][t][k]) for e, t, k in rows], dtype=torch.float64)
        ended = torch.tensor([bool(credit.terminated[e][t][k]) for e, t, k in rows])
        y = to_double(target.detach().flatten())[known]
        others = [v for x, v, _ in self.outputs if len(v) == len(target) and not torch.equal(x, states)]
        for value in candidates(others):
            if self._count(y, to_double(value)[known], reward, ended):
                self.lengths |= {length(credit, *row) for row, end in zip(rows, ended.tolist(), strict=True) if end}
                return

    def _count(self, y: Tensor, value: Tensor, reward: Tensor, ended: Tensor) -> bool:
        """Count the ended steps if reward and value explain the targets of the others."""
        columns = torch.stack([value, reward, torch.ones_like(value)], 1)
        if int((~ended).sum()) < ROWS // 2 or float(value.std()) == 0 or float(y[~ended].std()) == 0:
            return False
        weights = torch.linalg.lstsq(columns[~ended], y[~ended, None], driver="gelsd").solution[:, 0]
        left, least = columns @ weights - y, EXACT * float(y[~ended].std())
        # Else it is no target: an old log-probability
        rewarded = float((columns[~ended, 1:] @ weights[1:]).abs().mean()) > least
        if float(left[~ended].std()) > least or not rewarded or not 0.3 < float(weights[0]) < 1.1:
            return False
        if float(reward.std()) > 0:
            self.reward_weights.append(float(weights[1]))
        share = (weights[0] * value).abs()
        held, none = left.abs() < 0.05 * share, (left - weights[0] * value).abs() < 0.05 * share
        self.with_value += int((ended & held & ~none).sum())
        self.without += int((ended & ~held).sum())
        return True

    def fault(self) -> tuple[str, str] | None:
        """Return what was measured and its cause."""
        if self.with_value < FEWEST or self.without > 0.05 * self.with_value or len(self.lengths) < LENGTHS:
            return None
        return (
            f"at all {self.with_value} steps that ended an episode, the target is the reward and the value of the state after the end",
            "the mask of ended episodes is missing in the target: reward + gamma * (1 - done) * next_value",
        )


def length(credit: Credit, env: int, step: int, row: int) -> int:
    """Return how many steps an episode had that ended at a step."""
    before = next((t for t in range(step - 1, -1, -1) if credit.ends[env][t][row]), -1)
    return step - before


def candidates(outputs: list[Tensor]) -> Iterator[Tensor]:
    """Yield what may be the values of the next states: the best action's, that of another net's best action, the lower of two."""
    for y in outputs:
        if y.numel() == len(y):
            yield y.flatten()
        else:
            yield y.amax(1)
            yield from (
                y.gather(1, x.argmax(1, keepdim=True)).flatten() for x in outputs if x is not y and x.shape == y.shape
            )
    single = [y.flatten() for y in outputs if y.numel() == len(y)]
    if len(single) > 1:
        yield torch.minimum(single[-1], single[-2])
