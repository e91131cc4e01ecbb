"""Why parameters get no gradient, by experiment: their part of the loss has the weight 0, or the loss does not use it at all."""

import math
from collections.abc import Callable, Collection

import torch
from torch import nn

ROUNDING = 1e-6  # relative change of a loss that is none


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
