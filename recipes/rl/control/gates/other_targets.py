"""Targets of a Q-network other than DQN's that are right as well: of a soft policy (Munchausen DQN), and of one that explores (expected SARSA)."""

import math
from typing import TYPE_CHECKING, Any

import torch
from trainworthy.recipes.rl.control.gates.formulas import outputs

if TYPE_CHECKING:
    from trainworthy.recipes.rl.control.gates.recording import Seen

SOFT = "targets of a soft policy"


def exploring(found: list[float], greedy: list[list[float]], mean: list[list[float]]) -> float:
    """Return the weight of the mean value with which targets lie between those of the best value and of the mean: the median over rows."""
    rows = [(y, *a, *b) for y, a, b in zip(found, greedy, mean, strict=True) if len(a) == 1 and a != b]
    rates = sorted((y - a) / (b - a) for y, a, b in rows)
    return rates[len(rates) // 2] if rates else 0.0


def munchausen(cfg: Any, seen: "Seen", places: list[list[tuple[int, int]]], found: list[float]) -> str:
    """Return the description of the soft targets (Munchausen DQN, Vieillard 2020, equation 1; soft DQN with a weight of 0) that all targets
    `found` equal, with its temperature and weight; empty if they are others. One step, as in the paper."""
    rows = [(y, *some[0]) for y, some in zip(found, places, strict=True) if len(some) == 1]
    if cfg.n_step != 1 or len(rows) < 16:
        return ""
    y, t, i = (torch.tensor(column) for column in zip(*rows, strict=True))
    steps, size = seen.steps, seen.target.returns.rms.item()
    with seen.run.autocast():
        both = (steps[k][t, i] for k in ("observation", "next_observation"))
        now, after = (outputs(seen.target, x, seen.target).double() * size for x in both)
    action, alive = steps["action"][t, i].long()[:, None], ~steps["terminated"][t, i]
    reward, y = steps["reward"][t, i].double(), y.double()
    scale = y.abs().max().clamp_min(1e-9)

    def fitted(log_temperature: float, lowest: float) -> tuple[float, float]:
        """Return (largest relative difference at this temperature, the weight of the log-policy that fits best)."""
        tau = math.exp(log_temperature)
        log_p = (after / tau).log_softmax(-1)
        base = reward + cfg.gamma * alive * (log_p.exp() * (after - tau * log_p)).sum(-1)
        bonus = (tau * (now / tau).log_softmax(-1).gather(-1, action)[:, 0]).clamp(lowest * size, 0)
        weight = ((bonus @ (y - base)) / (bonus @ bonus).clamp_min(1e-12)).clamp(0, 1)
        return ((y - base - weight * bonus).abs().max() / scale).item(), weight.item()

    for lowest in (
        -1.0,
        -1.0 / size,
        -math.inf,
    ):  # the paper's bound, relative to the return scale or in rewards; or none
        at, width = math.log(0.1 * size), math.log(1000)
        for _ in range(30):  # the middle of ever smaller intervals
            at = min((at + width * k / 20 for k in range(-20, 21)), key=lambda x, low=lowest: fitted(x, low)[0])
            width /= 2
        off, weight = fitted(at, lowest)
        if off <= 1e-3:
            return f"{SOFT} (temperature {math.exp(at):.3g}, weight of the log-policy {weight:.2g})"
    return ""
