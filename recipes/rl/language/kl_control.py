"""Keeps a policy near its reference: the KL coefficient, and a check that stops a run whose policy drifts away."""

from typing import Any

import torch
from trainworthy.core.base.errors import Stop

BOUND = 1000.0  # limits of the coefficient, relative to its start, upwards and downwards
FAR = 4.0  # relative to the target
FEWER, SHORTER = 0.5, 0.25  # relative to the first rollout: distinct tokens, tokens
IN_A_ROW = 3  # rollouts


class Controller:
    """The KL coefficient (Ziegler 2019, section 2.2): it rises if the policy is further than `target` nats from its reference and falls if
    it is nearer, by at most `step` per update. A start of 0 stays 0."""

    def __init__(self, start: float, target: float, step: float):
        self.start, self.target, self.step = start, target, step
        self.value = start

    def update(self, kl: float) -> None:
        """`kl`: nats per completion, the mean over one rollout. Proportional within 20% of the target, as in Ziegler."""
        error = max(-1.0, min(1.0, (kl / self.target - 1) / 0.2))
        self.value = max(self.start / BOUND, min(self.start * BOUND, self.value * (1 + self.step * error)))

    def state_dict(self) -> dict[str, Any]:
        return {"value": torch.tensor(self.value, dtype=torch.float64)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"].item()


class Watch:
    """Compares every rollout with the first. A reward that rises while completions become short, repetitive or far from the reference is
    being exploited."""

    def __init__(self, target: float):
        self.target = target
        self.first = self.seen = torch.zeros(3, dtype=torch.float64)  # reward, share of distinct tokens, tokens
        self.odd = torch.zeros((), dtype=torch.int64)  # rollouts in a row
        self.units = torch.zeros((), dtype=torch.int64)

    def see(self, told: dict[str, float]) -> str:
        """Return what has been wrong for `IN_A_ROW` rollouts, or ""."""
        now = torch.tensor([told[k] for k in ("reward", "distinct", "tokens")], dtype=torch.float64)
        self.first = now if self.units == 0 else self.first
        self.units = self.units + 1
        reward, distinct, tokens = self.first.tolist()
        wrong = []
        if told["kl"] > FAR * self.target:
            wrong.append(f"{told['kl']:.3g} nats from the reference (target {self.target:g})")
        if told["distinct"] < FEWER * distinct:
            wrong.append(f"distinct tokens {told['distinct']:.0%} of a completion instead of {distinct:.0%}")
        if told["tokens"] < SHORTER * tokens:
            wrong.append(f"{told['tokens']:.3g} tokens instead of {tokens:.3g}")
        self.odd = self.odd + 1 if wrong and told["reward"] > reward else torch.zeros_like(self.odd)
        said = f"the reward rose from {reward:.3g} to {told['reward']:.3g}, and since {int(self.odd)} units: {', '.join(wrong)}"
        return said if self.odd >= IN_A_ROW else ""

    def stop(self, told: dict[str, float], unit: int) -> None:
        """Record a rollout, and end the run if something is wrong."""
        if said := self.see(told):
            raise Stop(
                f"the reward is being hacked (R1): {said}; the run stopped itself at iteration {unit}\n"
                "  likely cause: a reward with a hole, and a price of the distance that is missing, too low or too slow\n"
                "  next:         read the samples of the report; mend the reward, or hold the policy (--init-kl-coef 0.2)\n"
                "                (--no-stop-hacked goes on all the same)"
            )

    def state_dict(self) -> dict[str, Any]:
        return {"first": self.first, "odd": self.odd, "units": self.units}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first, self.odd, self.units = state["first"], state["odd"], state["units"]
