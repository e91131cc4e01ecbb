"""Why parameters get no gradient, by experiment: their part of the loss has the weight 0, or the loss does not use it at all."""

import math
from collections.abc import Callable, Collection

import torch
from torch import nn

ROUNDING = 1e-6  # relative change of a loss that is none
ALONE = 4  # tensors that are changed one by one


def _saddle(losses: Callable[[], dict[str, float]], chosen: dict[str, nn.Parameter], first: dict[str, float]) -> str:
    """Return that parameters start at zero where none of them alone, and all of them together, change the loss; else "". Each is then
    multiplied by another, and the gradient of all stays zero. The parameters keep their new values."""
    zero = {n: p for n, p in chosen.items() if not p.any()}
    draws = torch.Generator().manual_seed(0)

    def same() -> bool:
        return all(abs(v - first[k]) <= ROUNDING * abs(first[k]) for k, v in losses().items())

    for alone in list(zero.items())[:ALONE] if len(zero) > 1 else ():
        alone[1].data.copy_(0.1 * torch.randn(alone[1].shape, generator=draws))
        if not same():
            return ""
        alone[1].data.zero_()
    for p in zero.values():
        p.data.copy_(0.1 * torch.randn(p.shape, generator=draws))
    if len(zero) < 2 or same():
        return ""
    names = ", ".join(list(zero)[:2])
    return (f"{len(zero)} tensors start at zero and are multiplied by each other ({names}): one alone changes nothing, so none ever gets a "
            "gradient; start one of each pair at random values")  # fmt: skip


def explain_unheard(model: nn.Module, losses: Callable[[], dict[str, float]], names: Collection[str]) -> str:
    """Return the cause, or "" if the loss depends on the parameters `names` (a detach() then, or a dead activation).

    `losses` returns {term: value} in train mode, with the same batch and draws each time. The parameters get other finite values, then
    nan: only 0 times a finite number is 0. Parameters and buffers are afterwards what they were before.
    """
    own = dict(model.named_parameters())
    chosen = {n: own[n] for n in names if n in own and own[n].is_floating_point()}
    kept = {n: p.detach().clone() for n, p in chosen.items()}
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    if not chosen:
        return ""
    draws = torch.Generator().manual_seed(0)
    try:
        first = losses()
        if why := _saddle(losses, chosen, first):
            return why
        for n, p in chosen.items():
            p.data.copy_(kept[n])
        for p in chosen.values():
            noise = torch.randn(p.shape, generator=draws).to(p)
            p.data.add_(noise * (p.detach().float().std(unbiased=False).item() or 1.0))
        other = losses()
        for p in chosen.values():
            p.data.fill_(math.nan)
        last = losses()
    except (
        RuntimeError,
        ValueError,
        ArithmeticError,
        IndexError,
        KeyError,
        AssertionError,
    ):  # a model that refuses nan
        return ""
    finally:
        with torch.no_grad():
            for n, p in chosen.items():
                p.data.copy_(kept[n])
            for b, value in buffers:
                b.copy_(value)
    if any(not math.isfinite(v) for v in first.values()) or any(
        not abs(other.get(k, math.nan) - v) <= ROUNDING * abs(v) for k, v in first.items()
    ):
        return ""
    name, total = next(iter(chosen)), sum(first.values())
    lost = [k for k, v in last.items() if not math.isfinite(v)]
    same = f"other values of {name} leave the loss at {total:.6g}"
    if lost:
        term = f"term '{lost[0]}'" if len(lost) < len(first) else "loss"
        return f"the part of the loss that uses {name} has the weight 0: {same}, and nan makes the {term} nan (0 times nan)"
    return f"the loss does not use {name}: {same}, even nan (its output is thrown away, or its loss is not added)"
