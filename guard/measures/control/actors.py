"""Finds a deterministic or reparametrised policy that learns actions of low value: its loss is a critic's value of its actions, without
the minus.

A critic is called on known observations with actions that carry a gradient. What the loss adds for a higher value is the gradient that
arrives at the critic's output. That a higher value is better is known from the critic's own targets, in which rewards count positively.
"""

from typing import Any

from torch import Tensor
from trainworthy.core.base.verdict import Fault
from trainworthy.guard.hooks.trees import floats
from trainworthy.guard.measures.control.policy_rewards import Credit
from trainworthy.guard.measures.records import on_gradient

CALLS = 256
FEWEST = 8


class Actors:
    """Signs of the gradient of losses with respect to values of a policy's actions."""

    def __init__(self) -> None:
        self.raised = self.lowered = 0

    def root(self, args: tuple, out: Any, credit: Credit) -> None:
        """Note a model's call on observations and actions."""
        given = [x for x in args if isinstance(x, Tensor)]
        if not credit.where or len(given) < 2 or self.raised + self.lowered >= CALLS:
            return
        states = [x for x in given if not x.requires_grad and x.dim() == 2 and x.is_floating_point()]
        value = next((y for y in floats(out) if y.requires_grad and y.numel() == len(y)), None)
        if value is None or not any(x.grad_fn is not None for x in given) or not any(known(x, credit) for x in states):
            return
        on_gradient(value, self._count)

    def _count(self, gradient: Tensor) -> None:
        up, down = bool((gradient < 0).any()), bool((gradient > 0).any())  # a loss falls against its gradient
        self.raised += up and not down
        self.lowered += down and not up

    def fault(self, reward_weights: list[float]) -> Fault | None:
        """Return what was measured and its cause. `reward_weights`: of the rewards in the critic's targets."""
        if self.lowered < FEWEST or self.raised or not reward_weights or min(reward_weights) <= 0:
            return None
        return (
            f"at all {self.lowered} steps of the policy its loss lowers the critic's value of its actions, in which rewards count positively",
            "the minus is missing: a policy's loss is -critic(state, policy(state)).mean()",
        )


def known(x: Tensor, credit: Credit) -> bool:
    """Return whether rows are observations that an environment gave."""
    places = credit.places(x.detach()[:32].float().cpu().numpy())
    return sum(p is not None for p in places) >= 0.5 * len(places)
