"""The objectives of PPO, DQN and SAC, stated independently from their papers. The gate `formula` compares a loss with them.

For each term of the loss a statement gives one number per sample (B,), through which autograd works: the formula, other published forms
that a fork may use on purpose, and known mistakes, so that the gate can name what it finds. Nothing is shared with a recipe's `loss`,
except that outputs and values come from the same net.
"""

import copy
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Normal
from trainworthy.core.gates.checks.formula import Statement, Statements
from trainworthy.recipes.rl.control.models import heads

LIKELY_BONUS = 1.0  # coefficient that stands in for an entropy bonus that is off
MOVES = {"log_prob": 0.4, "value": 0.5, "return": 0.5}
"""Standard deviation of noise on entries of a real batch, so that every side of a clip is active and errors have all sizes."""


def outputs(net: Any, rows: Tensor, like: nn.Module) -> Tensor:
    """Return the output of `net` for `rows` on the CPU."""
    return net(rows.to(next(like.parameters()).device)).float().cpu()


def distribution(model: nn.Module, outputs: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """Return (log-probability of `action`, entropy), (B,) each, from the policy's outputs: by torch's distributions, or by a fork's own head
    (which the gate `density` checks)."""
    head = model.head
    if not action.is_floating_point():
        chances = Categorical(logits=outputs.float())
        return chances.log_prob(action), chances.entropy()
    if isinstance(head, heads.Gaussian):
        mean, log_std = outputs.float().chunk(2, -1)
        normal = Normal(mean, log_std.exp())
        return normal.log_prob(action).sum(-1), normal.entropy().sum(-1)
    return head.log_prob(outputs, action), head.entropy(outputs)


# ------------------------------------------------------------------------------------------------------------------ PPO
def ppo(cfg: Any, model: nn.Module, batch: dict, got: dict[str, Tensor]) -> Statements:
    """Schulman 2017, equations 7 and 9. `got`: the recipe's own terms per sample."""
    outputs, value, *_ = model(batch["observation"], through=True)
    new, entropy = distribution(model, outputs, batch["action"])
    old, gain, back, before = (batch[k] for k in ("log_prob", "advantage", "return", "value"))
    policy = surrogate(new, old, gain, cfg.clip_range, got.get("policy"))
    near = before + (value - before).clamp(-cfg.clip_range_vf, cfg.clip_range_vf)
    plain, clipped = (value - back).square(), (near - back).square()
    weight = 0.5 * cfg.vf_coef
    bonus = (cfg.ent_coef or LIKELY_BONUS) * entropy
    own = value + (value - value.detach()).clamp(-cfg.clip_range_vf, cfg.clip_range_vf)
    return {
        "policy": policy,
        "value": Statement(
            {"the clipped squared error": weight * torch.max(plain, clipped), "the squared error, not clipped": weight * plain,
             "Huber's loss": 2 * weight * huber(value - back)},
            {"the smaller of the two errors is used instead of the larger": weight * torch.min(plain, clipped),
             "only the clipped error is used": weight * clipped,
             "the value is clipped around the new value instead of the rollout's":
                 weight * torch.max(plain, (own - back).square())},
            setting="vf_coef",
        ),
        "entropy": Statement({"the entropy": -bonus}, optional=not cfg.ent_coef, setting="ent_coef"),
    }  # fmt: skip


def surrogate(new: Tensor, old: Tensor, gain: Tensor, clip: float, got: Tensor | None) -> Statement:
    """PPO's clipped objective for log-probabilities after and before and advantages `gain`, (B,) each."""

    def clipped(low: float, high: float) -> Tensor:
        return -torch.min(ratio * gain, ratio.clamp(1 - low, 1 + high) * gain)

    ratio = (new - old).exp()
    right = {"the clipped surrogate": clipped(clip, clip)}
    if got is not None and got.shape == gain.shape:
        # The largest effective ratio of positive advantages is the upper bound, the smallest of negative ones the lower bound. A value
        # that several samples share is a bound; else it is only the most distant sample.
        each = (-got / gain).detach()
        up, down = each[gain > 0], each[gain < 0]
        if len(up) and len(down):
            low, high = 1 - down.min().item(), up.max().item() - 1
            at = [((side - bound).abs() < 1e-4).sum().item() for side, bound in ((down, 1 - low), (up, 1 + high))]
            if 0.01 <= low < 1 and 0.01 <= high <= 5 and min(at) >= 3:
                right[f"the clipped surrogate, clipped at {1 - low:.2f} and {1 + high:.2f}"] = clipped(low, high)
        plain = {"the clipped surrogate": right["the clipped surrogate"], "the surrogate without a clip": -ratio * gain}
        distances = {"KL (k2)": 0.5 * (new - old).square(), "KL (k3)": ratio - 1 - (new - old),
                     "|advantage| x (ratio - 1)^2 (SPO)": gain.abs() * (ratio - 1).square()}  # fmt: skip
        for (base, form), (name, distance) in product(plain.items(), distances.items()):
            beta = (
                (got - form).detach() @ distance.detach() / distance.detach().square().sum().clamp_min(1e-12)
            ).item()
            if 1e-3 < beta < 100:
                right[f"{base} and {beta:.2g} x {name}"] = form + beta * distance
    wrong = {
        "the ratio is 1 everywhere: the new probability is divided by itself instead of the rollout's":
            -(new - new.detach()).exp() * gain,
        "the ratio is missing: this is the plain policy gradient, log-probability times advantage": -new * gain,
        "the ratio is inverted: old over new": -torch.min((-(new - old)).exp() * gain,
                                                           (-(new - old)).exp().clamp(1 - clip, 1 + clip) * gain),
        "the maximum instead of the minimum": -torch.max(ratio * gain, ratio.clamp(1 - clip, 1 + clip) * gain),
        "the ratio is not clipped": -ratio * gain,
        "only the clipped ratio is used: the minimum with the unclipped one is missing": -ratio.clamp(1 - clip, 1 + clip) * gain,
        "the ratio is clipped only from above": -torch.min(ratio * gain, ratio.clamp(max=1 + clip) * gain),
        "advantages lose their sign": clipped(clip, clip).abs(),
    }  # fmt: skip
    return Statement(right, wrong)


# ------------------------------------------------------------------------------------------------------------------ DQN
def dqn(cfg: Any, model: nn.Module, batch: dict, got: dict[str, Tensor]) -> Statements:
    """Mnih 2015 with the weights of Schaul 2016. The targets are in the batch (see the gate `returns`)."""
    worths, weight = model(batch["observation"]), batch.get("weight", torch.ones_like(batch["return"]))
    rows = torch.arange(len(worths), device=worths.device)
    off, best = worths[rows, batch["action"]] - batch["return"], worths.max(-1).values - batch["return"]
    return {
        "value": Statement(
            {"Huber's loss": weight * huber(off), "half of the squared error": weight * 0.5 * off.square()},
            {"the largest value is used instead of the taken action's": weight * huber(best),
             "the importance weights of prioritised replay are not applied": huber(off),
             "the absolute error is used: its gradient does not shrink near the target": weight * off.abs()},
        )
    }  # fmt: skip


def huber(off: Tensor) -> Tensor:
    """Quadratic up to 1, then linear (Huber 1964)."""
    size = off.abs()
    return torch.where(size < 1, 0.5 * off.square(), size - 0.5)


# ------------------------------------------------------------------------------------------------------------------ SAC
def sac(cfg: Any, model: nn.Module, batch: dict, got: dict[str, Tensor]) -> Statements:
    """Haarnoja 2018 (algorithms and applications), equations 5, 9 and 18. Each term updates its own part only. The
    policy may use the critics' mean, too (REDQ, Chen 2021; with two critics DroQ, Hiraoka 2022): the targets' lowest one prevents overestimates."""
    seen, back = batch["observation"], batch["return"]
    values = critics(model.critics, model.scaled(seen), batch["action"])
    action, log_prob = model.sample(seen, batch["noise"])
    fixed = critics(copy.deepcopy(model.critics).requires_grad_(False), model.scaled(seen), action)
    log_alpha = model.log_temperature
    alpha = log_alpha.detach().exp()
    surplus = -(log_prob.detach() + cfg.target_entropy * model.n_act)
    half = [0.5 * (one - back).square() for one in values]
    pairs = {f"the policy uses only critic {i}": alpha * log_prob - one for i, one in enumerate(fixed)}
    return {
        "critic": Statement(
            {"both critics' squared errors": sum(half), "both critics' Huber loss": sum(huber(one - back) for one in values)},
            {f"only critic {i} is trained": one for i, one in enumerate(half)}),
        "policy": Statement(
            {"temperature x log-probability minus the lower critic": alpha * log_prob - fixed.amin(0)}
            | ({"the same with the mean of all critics (REDQ, DroQ)": alpha * log_prob - fixed.mean(0)} if len(fixed) > 1 else {}),
            pairs | {
                     "the policy uses the higher critic": alpha * log_prob - fixed.amax(0),
                     "the entropy has the wrong sign: certainty is rewarded": -alpha * log_prob - fixed.amin(0),
                     "the entropy is missing": -fixed.amin(0),
                     "the critics have the wrong sign: the worst action is learnt": alpha * log_prob + fixed.amin(0)}),
        "temperature": Statement(
            {"log temperature x entropy surplus": log_alpha * surplus,
             "temperature x entropy surplus": log_alpha.exp() * surplus},
            {"the target entropy has the wrong sign": log_alpha * -(log_prob.detach() - cfg.target_entropy * model.n_act)},
            optional=not log_alpha.requires_grad),  # a fixed temperature, as in the first paper
    }  # fmt: skip


def critics(nets: nn.Module, observation: Tensor, action: Tensor) -> Tensor:
    """Return the output of each of `nets`, (nets, B)."""
    return torch.stack([net(torch.cat([observation, action], -1)).squeeze(-1) for net in nets])
