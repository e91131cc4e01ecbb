"""Whether a loss of no published form still does what PPO's or DQN's does: a policy follows the advantages by its ratio, a value is drawn to
its target. The gate `formula` asks this of a term that equals neither its formula nor a known mistake."""

from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn
from trainworthy.recipes.rl.control.gates import formulas

NEAR, FAR = 0.15, 0.5  # log-ratios: where no published objective holds the ratio, and where most do
CLEAR = 0.1  # of the standard deviation: smaller advantages and errors have no sign
HELD = 0.8  # share of the plain gradient that is left where the policy has moved along its advantage, at most
FEW = 4  # samples
ALONG = 0.98  # cosine of gradients
UNREAD = "its gradient with respect to the stored numbers cannot be read"


def policy(loss: Callable[[dict], Tensor], model: nn.Module, batch: dict, read: Callable[[], Tensor]) -> str:
    """Return what is wrong with a policy loss that should be a function of ratio and advantage; "" if nothing is. `read` computes the
    log-probabilities of what was done, of the shape of the stored ones. Where the batch has `valid`, nothing else may count."""
    new = read()
    slope, fault = _slope(loss, model, batch, "log_prob", new)
    if fault:
        return fault
    counts = batch.get("valid", torch.ones_like(new, dtype=torch.bool))
    slope, new, old, gain = (x[counts] for x in (slope, new, batch["log_prob"], batch["advantage"]))
    moved, clear = (new - old).detach(), gain.abs() > CLEAR * gain.std()
    pull = slope / gain.where(clear, 1.0)  # of log-ratio and advantage: 1 for the plain policy gradient
    near, behind = clear & (moved.abs() <= NEAR), clear & (moved * gain.sign() < -FAR)
    ahead = clear & (moved * gain.sign() > FAR)
    for where, some in (
        ("where the policy has hardly moved", near),
        ("where it has moved against the advantage", behind),
    ):
        if (pull[some] <= 0).any():
            return f"{where}, {int((pull[some] <= 0).sum())} of {int(some.sum())} samples are not pushed along their advantage"
    if int(near.sum()) < FEW or pull[near].max() > 2 * pull[near].min():
        return "samples whose policy has hardly moved are not weighted by their advantages"
    if int(ahead.sum()) >= FEW and (pull[ahead] / moved[ahead].exp()).median() > HELD * pull[near].median():
        return "nothing holds the ratio back where it has moved along the advantage"
    return ""


def value(loss: Callable[[dict], Tensor], model: nn.Module, batch: dict, read: Callable[[], Tensor]) -> str:
    """Return what is wrong with a loss that should draw a value, which `read` computes, to its target; "" if nothing is. Where the batch
    has `valid`, nothing else may count."""
    found = read()
    slope, fault = _slope(loss, model, batch, "return", found)
    if fault:
        return fault
    counts = batch.get("valid", torch.ones_like(found, dtype=torch.bool))
    slope, off = slope[counts], (found - batch["return"]).detach()[counts]
    clear = off.abs() > CLEAR * off.std()
    away = int(((slope * off)[clear] > 0).sum())
    if away:
        return f"{away} of {int(clear.sum())} samples are driven away from their target"
    if 2 * int((slope[clear] == 0).sum()) > int(clear.sum()):
        return "most samples have no gradient"
    return ""


def _slope(
    loss: Callable[[dict], Tensor], model: nn.Module, batch: dict, key: str, output: Tensor
) -> tuple[Tensor, str]:
    """Return the gradient of a loss with respect to a stored entry, of its shape, and what is wrong: the loss must depend on the entry only
    by its difference from `output`, of the same shape, so that both have opposite gradients, and not on padding."""
    stored = batch[key].detach().clone().requires_grad_()
    total = loss(batch | {key: stored})
    weights = [p for p in model.parameters() if p.requires_grad]
    if not total.requires_grad:
        return torch.zeros_like(stored), "it has no gradient"
    (slope,) = torch.autograd.grad(total, [stored], retain_graph=True, allow_unused=True)
    if slope is None:
        return torch.zeros_like(stored), UNREAD
    if "valid" in batch and slope[~batch["valid"]].any():
        return slope, f"padding counts: {int((slope[~batch['valid']] != 0).sum())} of its tokens have a gradient"
    due = gradient((-slope.detach() * output).sum(), weights)
    along = torch.cosine_similarity(gradient(total, weights), due, 0).item()
    fault = f"its gradient is not that of the stored `{key}` and what the model gives for it (cosine {along:.2f})"
    return slope, "" if along >= ALONG else fault


def gradient(total: Tensor, weights: list[Tensor]) -> Tensor:
    """Return the gradient of a scalar as one vector, 0 where it has none."""
    if not total.requires_grad:
        return torch.cat([torch.zeros_like(p).flatten() for p in weights])
    grads = torch.autograd.grad(total, weights, retain_graph=True, allow_unused=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(weights, grads, strict=True)])


def checks(
    loss: Callable[[dict], dict[str, Tensor]], model: nn.Module, batch: dict, terms: Collection[str]
) -> dict[str, Callable[[], str]]:
    """Return {term: its check} for the terms that have one. `terms`: names of the statements."""

    def term(name: str) -> Callable[[dict], Tensor]:
        return lambda one: loss(one)[name].float().sum()

    def taken() -> Tensor:
        worths = model(batch["observation"])
        return worths[torch.arange(len(worths), device=worths.device), batch["action"]]

    def likely() -> Tensor:
        return formulas.distribution(model, model(batch["observation"], through=True)[0], batch["action"])[0]

    if {"policy", "value"} <= set(terms) and {"log_prob", "advantage", "return"} <= batch.keys():
        return {"policy": lambda: policy(term("policy"), model, batch, likely),
                "value": lambda: value(term("value"), model, batch, lambda: model(batch["observation"], through=True)[1])}  # fmt: skip
    if set(terms) == {"value"}:
        return {"value": lambda: value(term("value"), model, batch, taken)}
    return {}
