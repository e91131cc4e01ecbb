"""Keeps a policy near its reference: the KL coefficient, and a check that stops a run whose policy drifts away."""

from typing import Any

import torch
from trainworthy.core.base.errors import Stop, UserError
from transformers import Trainer, TrainerCallback

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


class Adapt(TrainerCallback):
    """Moves the KL coefficient of TRL's trainer (`beta`) after each iteration, by the KL of its last update: the mean over the tokens of
    all processes. It logs the coefficient that the update had."""

    def __init__(self, trainer: Trainer, controller: Controller, passes: int):
        self.trainer, self.controller, self.passes = trainer, controller, passes

    def on_log(self, args, state, control, logs: dict[str, float], **_) -> None:
        if "loss" not in logs or logs.get("kl") is None:  # the trainer's summary has none
            return
        logs["beta"] = self.trainer.beta
        if state.global_step % self.passes == 0:
            self.controller.update(logs["kl"])
            self.trainer.beta = self.controller.value


def adapted(trainer: Trainer, cfg: Any) -> Controller:
    """The controller that moves the coefficient of `trainer` from --beta towards --target-kl."""
    controller = Controller(cfg.beta, cfg.target_kl, cfg.kl_coef_rate)
    trainer.add_callback(Adapt(trainer, controller, cfg.num_iterations))
    return controller


def checked(start: float, target: float, rate: float) -> None:
    """Raise UserError if a coefficient with these settings could not do what they say."""
    if start < 0 or target < 0:
        raise UserError(
            "a KL coefficient and its target are not negative", got=f"--beta {start:g} --target-kl {target:g}"
        )
    if target and not start:
        raise UserError(f"--target-kl {target:g} has no effect: --beta is 0, and a coefficient of 0 stays 0", needed="--beta above 0",
                        next="--beta 0.04")  # fmt: skip
    if target and not 0 < rate < 1:
        raise UserError(
            f"--kl-coef-rate {rate:g}",
            needed="a relative change per iteration, above 0 and below 1",
            next="--kl-coef-rate 0.1",
        )


class Watch:
    """Compares every rollout with the first. A reward that rises while completions become short, repetitive or far from the reference is
    being exploited."""

    def __init__(self, target: float):
        self.target = target
        self.first = self.seen = torch.zeros(3, dtype=torch.float64)  # reward, share of distinct tokens, tokens
        self.odd = torch.zeros((), dtype=torch.int64)  # rollouts in a row
        self.units = torch.zeros((), dtype=torch.int64)

    def see(self, metrics: dict[str, float]) -> str:
        """Return what has been wrong for `IN_A_ROW` rollouts, or ""."""
        now = torch.tensor([metrics[k] for k in ("reward", "distinct", "tokens")], dtype=torch.float64)
        self.first = now if self.units == 0 else self.first
        self.units = self.units + 1
        reward, distinct, tokens = self.first.tolist()
        wrong = []
        if metrics["kl"] > FAR * self.target:
            wrong.append(f"{metrics['kl']:.3g} nats from the reference (target {self.target:g})")
        if metrics["distinct"] < FEWER * distinct:
            wrong.append(f"distinct tokens {metrics['distinct']:.0%} of a completion instead of {distinct:.0%}")
        if metrics["tokens"] < SHORTER * tokens:
            wrong.append(f"{metrics['tokens']:.3g} tokens instead of {tokens:.3g}")
        self.odd = self.odd + 1 if wrong and metrics["reward"] > reward else torch.zeros_like(self.odd)
        reason = f"the reward rose from {reward:.3g} to {metrics['reward']:.3g}, and for {int(self.odd)} iterations: {', '.join(wrong)}"
        return reason if self.odd >= IN_A_ROW else ""

    def stop(self, metrics: dict[str, float], iteration: int) -> None:
        """Record a rollout, and end the run if something is wrong."""
        if reason := self.see(metrics):
            raise Stop(
                f"the reward is being hacked (R1): {reason}; the run stopped itself at iteration {iteration}\n"
                "  likely cause: a reward with a hole, and a KL coefficient that is missing, too small or too slow to adapt\n"
                "  next:         read the samples of the report; correct the reward, or keep the policy near its start (--init-kl-coef 0.2)\n"
                "                (--no-stop-hacked goes on all the same)"
            )

    def state_dict(self) -> dict[str, Any]:
        return {"first": self.first, "odd": self.odd, "units": self.units}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first, self.odd, self.units = state["first"], state["odd"], state["units"]
