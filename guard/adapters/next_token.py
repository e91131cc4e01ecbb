"""The lowest loss of a model that predicts each next token from the ones before it."""

import math
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from trainworthy.guard.adapters.entries import Samples

if TYPE_CHECKING:
    from trainworthy.guard.adapters.script_stage import Script

EXAMPLES = 8


def reachable(
    script: "Script", data: Samples, loss_floor: float, floor: float, ceiling: float, own_target: bool = False
) -> tuple[Callable[[dict], float], Callable[[dict], float]]:
    """Return (lowest loss, metric to reach) of a batch that is memorised: `loss_floor`, and 95% of the way from `floor` to `ceiling`
    (`own_target`: 90%; what a code with noise gives back of an input is not exact).
    Where the target is the next token, no model can save the loss of a token with nothing before it. That also limits a metric whose
    best value is not declared and which is lower for better models."""
    names = None if loss_floor else next_tokens(data)

    def lowest(named: dict) -> float:
        if names is None:
            return loss_floor
        own = named[names[1]] >= 0
        scored = bool(own.all()) if script.count is None else script.count(data.batch(named)) == own.sum().item()
        return lowest_loss(named[names[0]], named[names[1]]) if scored else loss_floor

    def goal(named: dict) -> float:
        limited = script.ceiling is None and not script.higher_is_better
        best = ceiling + (lowest(named) - loss_floor if limited else 0.0)
        return floor + (0.9 if own_target else 0.95) * (best - floor)

    return lowest, goal


def next_tokens(data: Samples) -> tuple[str, str] | None:
    """Return (input, target) if the target is the input's next tokens (negative ones are not scored), else None."""
    inputs, targets = ([k for k, f in data.fields.items() if f.role == role] for role in ("input", "target"))
    if len(inputs) != 1 or len(targets) != 1:
        return None
    for i in data.representative(min(len(data), EXAMPLES)):
        sample = data.get(i, None)
        if any(isinstance(sample[k], str) for k in (*inputs, *targets)):
            return None
        x, y = torch.as_tensor(sample[inputs[0]]), torch.as_tensor(sample[targets[0]])
        if x.ndim != 1 or x.shape != y.shape or len(x) < 2 or x.is_floating_point() or y.is_floating_point():
            return None
        scored = y[:-1] >= 0
        if not scored.any() or not torch.equal(x[1:][scored], y[:-1][scored]):
            return None
    return inputs[0], targets[0]


def lowest_loss(inputs: Tensor, targets: Tensor) -> float:
    """Return the mean loss in nats of the best answers to a batch (B, T): where equal beginnings go on differently, the entropy of what
    follows. Negative targets are not scored."""
    following: dict[tuple[int, ...], Counter[int]] = {}
    for x, y in zip(inputs.tolist(), targets.tolist(), strict=True):
        for t, token in enumerate(y):
            if token >= 0:
                following.setdefault(tuple(x[: t + 1]), Counter())[token] += 1
    nats = sum(-n * math.log(n / seen.total()) for seen in following.values() for n in seen.values())
    return nats / max(1, sum(seen.total() for seen in following.values()))
