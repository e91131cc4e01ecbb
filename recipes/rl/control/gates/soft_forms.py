"""Whether the terms of a soft actor-critic of no published form still do what SAC's do: each critic is drawn to the target, the policy trades
the critics' values for entropy at the temperature, and the temperature follows the entropy. The gate `formula` asks this of a term that
equals neither its formula nor a known mistake."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from trainworthy.core.gates.checks.formula import row
from trainworthy.recipes.rl.control.gates.formulas import critics
from trainworthy.recipes.rl.control.gates.own_forms import ALONG, CLEAR, gradient

TRADE = 0.05  # of the temperature: how far from it the weight of the log-probability may be
UNHEARD = 1e-4  # share of the policy's gradient below which it is rounding
UNREAD = "the values of its actions give the policy no gradient: the critics value the stored actions, or the new ones without a graph"
LEFT = 0.1  # share of the policy's gradient that values and log-probability need not explain


def checks(
    cfg: Any, loss: Callable[[dict], dict[str, Tensor]], model: nn.Module, batch: dict
) -> dict[str, Callable[[], str]]:
    """Return {term: its check}."""
    return {
        "critic": lambda: critic(lambda one: loss(one)["critic"], model, batch),
        "policy": lambda: policy(lambda one: loss(one)["policy"], model, batch),
        "temperature": lambda: temperature(lambda one: loss(one)["temperature"], model, batch, cfg.target_entropy),
    }


def critic(loss: Callable[[dict], Tensor], model: nn.Module, batch: dict) -> str:
    """Return what is wrong with a loss that should draw every critic to the stored `return`; "" if nothing is."""
    nets = [list(net.parameters()) for net in model.critics]
    pulls, gaps = [], []  # a row for each sample, a column for each critic
    for one in _rows(batch):
        total, values = loss(one), critics(model.critics, model.scaled(one["observation"]), one["action"])[:, 0]
        pull = []
        for i, weights in enumerate(nets):
            mine, theirs = gradient(total, weights), gradient(values[i], weights)
            if mine.any() and torch.cosine_similarity(mine, theirs, 0).abs() < ALONG:
                return f"the gradient of critic {i} is not that of its value of the stored action"
            pull.append((mine @ theirs).item())
        pulls.append(pull)
        gaps.append((values - one["return"]).tolist())
    for i, (pull, off) in enumerate(zip(torch.tensor(pulls).T, torch.tensor(gaps).T, strict=True)):
        clear = off.abs() > CLEAR * off.std()
        if away := int(((pull * off)[clear] < 0).sum()):
            return f"critic {i}: {away} of {int(clear.sum())} samples are driven away from their target"
        if 2 * int((pull[clear] == 0).sum()) > int(clear.sum()):
            return f"critic {i}: most samples have no gradient"
    return ""


def policy(loss: Callable[[dict], Tensor], model: nn.Module, batch: dict) -> str:
    """Return what is wrong with a loss that should be temperature x log-probability minus a mixture of the lowest and the highest value, where
    the lowest counts at least as much; "" if nothing is."""
    fixed = list(model.critics.parameters())
    weights = [p for p in model.actor.parameters() if p.requires_grad]
    got, parts = [], []
    for one in _rows(batch):
        total = loss(one)
        if gradient(total, fixed).any():
            return "the critics get a gradient from it"
        action, log_prob = model.sample(one["observation"], one["noise"])
        values = critics(model.critics, model.scaled(one["observation"]), action)
        got.append(gradient(total, weights))
        parts.append(torch.stack([gradient(v.sum(), weights) for v in (log_prob, values.amin(0), values.amax(0))], 1))
    mine, basis = torch.cat(got).double(), torch.cat(parts).double()  # (rows x weights,), (rows x weights, 3)
    found = torch.linalg.lstsq(basis, mine[:, None], driver="gelsd").solution[:, 0]
    if not mine.any():
        return "the policy gets no gradient from it"
    left = ((mine - basis @ found).norm() / mine.norm()).item()
    log_p, low, high = found.tolist()
    if (basis[:, 1:] @ found[1:]).norm() < UNHEARD * mine.norm():
        return UNREAD
    if left > LEFT:
        return f"{left:.0%} of its gradient is neither that of the values nor that of the log-probability"
    if low + high >= 0:
        return "the policy is driven to actions of lower value"
    if high < 0 and high < 1.01 * low:
        return "the higher value counts more than the lower"
    trade, alpha = log_p / -(low + high), model.log_temperature.exp().item()
    if abs(trade - alpha) > TRADE * alpha:
        return f"a nat of entropy is traded for {trade:.3g} of the value, the temperature is {alpha:.3g}"
    return ""


def temperature(loss: Callable[[dict], Tensor], model: nn.Module, batch: dict, target_entropy: float) -> str:
    """Return what is wrong with a loss whose gradient should be the surplus of entropy times one factor; "" if nothing is."""
    slopes, surpluses = [], []
    for one in _rows(batch):
        slopes.append(gradient(loss(one), [model.log_temperature]).item())
        log_prob = model.sample(one["observation"], one["noise"])[1].detach()
        surpluses.append(-(log_prob.sum().item() + target_entropy * model.n_act))
    slope, surplus = torch.tensor(slopes).double(), torch.tensor(surpluses).double()
    basis = torch.stack([surplus, torch.ones_like(surplus)], 1)
    factor, rest = torch.linalg.lstsq(basis, slope[:, None]).solution[:, 0].tolist()
    left = ((slope - basis @ slope.new_tensor([factor, rest])).norm() / slope.norm().clamp_min(1e-12)).item()
    if factor <= 0 or left > LEFT:
        return "its gradient does not follow the surplus of entropy"
    if abs(rest / factor) > LEFT * max(1.0, abs(target_entropy * model.n_act)):
        return f"it is at rest at a surplus of entropy of {-rest / factor:+.2g} nats, not at the target entropy"
    return ""


def _rows(batch: dict) -> Iterator[dict]:
    return (row(batch, i) for i in range(len(batch["return"])))
