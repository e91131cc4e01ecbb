"""Checks that hold for any training loop, on one observed run: wiring, gradients, modes, schedule, frozen, evaluated
model.

Each check returns a dict with `id`, `ok`, `measured`, `cause` (empty if ok) or `skip`; `NEEDED` holds what it needs.
"""

import gc
from typing import Any

import torch
from torch import nn
from trainworthy.core.guard.observer import Observer
from trainworthy.core.guard.records import Group

NEEDED = {
    "finite": "losses and gradients are finite",
    "wiring": "every parameter of a trained model that gets a gradient is in an optimiser, and the other way round; weights move",
    "gradients": "each step() uses the gradients of the backward() calls since the step before, all of them, once",
    "clipping": "gradients are clipped between backward() and step(), after unscale_()",
    "schedule": "the rate is positive, and at the end of the first of several epochs at least a tenth of its peak",
    "frozen": "what was frozen does not move, what was unfrozen is in an optimiser",
    "modes": "train mode while training; no dropout and no batch statistics while evaluating",
    "evaluated": "the model that is evaluated is the one that trains, on inputs of the same scale",
    "dependency": "in eval mode the output of a sample depends on that sample alone, and of a token on no later one",
    "targets": "targets vary, are not their own inputs, are paired with one prediction each, and belong to its input",
    "direction": "an attack raises the loss; a generator moves its samples towards what the critic takes for real; a policy follows the rewards",
    "noise": "signal and noise are weighted by deviations, and the net gets the time that its input was noised to",
    "loss-input": "cross_entropy and the losses with logits get logits, nll_loss and kl_div get logarithms",
    "samples": "another order every epoch, every sample can be drawn, none of them in validation too, both encoded alike",
    "passes": "batches that are drawn are learnt from",
    "state": "a kept state_dict is a copy, and a saved one is not empty",
    "learning": "the evaluation is about as good as training was on samples that it saw for the first time",
}


def finding(id: str, measured: str, cause: str = "", **evidence: Any) -> dict:
    """Return a check's result; `cause` makes it a failure."""
    return {"id": id, "ok": not cause, "measured": measured, "cause": cause, "evidence": evidence}


def skip(id: str, why: str) -> dict:
    """Return the result of a check that does not apply."""
    return {"id": id, "skip": why}


def stepped(seen: Observer) -> list[Group]:
    """Return optimisers that made a step and still exist."""
    return [g for g in seen.groups.values() if g.steps and g.ref() is not None]


def tops() -> list[nn.Module]:
    """Return modules that are not part of another, largest first."""
    everything = [m for m in gc.get_objects() if issubclass(type(m), nn.Module)]
    children = {id(c) for m in everything for c in m._modules.values() if c is not None}
    found = [m for m in everything if id(m) not in children and next(m.parameters(), None) is not None]
    return sorted(found, key=lambda m: -sum(p.numel() for p in m.parameters()))


def names(modules: list[nn.Module]) -> dict[int, str]:
    """Return parameter names, each relative to the largest module that holds it."""
    found: dict[int, str] = {}
    for m in modules:
        for name, p in m.named_parameters():
            found.setdefault(id(p), name)
    return found


def listed(what: list[str], n: int = 3) -> str:
    """Format a few names."""
    return ", ".join(what[:n]) + (f" and {len(what) - n} more" if len(what) > n else "")


def finite(seen: Observer) -> dict:
    """Find non-finite losses or gradients in the first steps."""
    bad = seen.nonfinite
    grads = sum(g.nonfinite for g in stepped(seen))
    scaler = seen._scaler is not None
    if bad or (grads and not scaler):
        where = (
            f"loss of backward() {bad[0] + 1} is not finite" if bad else f"gradients at {grads} steps are not finite"
        )
        return finding(
            "finite", where, "a logarithm or root of zero, a division by an empty count, a rate far too high"
        )
    return finding("finite", f"{len(seen.losses)} losses finite")


def moved_now(seen: Observer, p: torch.Tensor) -> bool:
    """Return whether it has changed since before training."""
    return id(p) in seen.snap and not torch.equal(p.detach().flatten()[:256], seen.snap[id(p)][1])
