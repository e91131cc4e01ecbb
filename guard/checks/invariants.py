"""Checks that hold for any training loop, on one observed run: wiring, gradients, modes, schedule, frozen, evaluated
model.

Each check returns `checks.finding(...)` or `checks.skip(...)`.
"""

import gc

import torch
from torch import nn
from trainworthy.guard.checks.results import finding
from trainworthy.guard.hooks.parameters import named_parameters_of, parameters_of
from trainworthy.guard.measures.records import Group
from trainworthy.guard.observing.observer import Observer


def stepped(seen: Observer) -> list[Group]:
    """Return optimisers that made a step and still exist."""
    return [g for g in seen.groups.values() if g.steps and g.ref() is not None]


def tops() -> list[nn.Module]:
    """Return modules that are not part of another, largest first."""
    everything = [m for m in gc.get_objects() if issubclass(type(m), nn.Module)]
    children = {id(c) for m in everything for c in m._modules.values() if c is not None}
    found = [m for m in everything if id(m) not in children and next(parameters_of(m), None) is not None]
    return sorted(found, key=lambda m: -sum(p.numel() for p in parameters_of(m)))


def names(modules: list[nn.Module]) -> dict[int, str]:
    """Return parameter names, each relative to the largest module that holds it."""
    found: dict[int, str] = {}
    for m in modules:
        for name, p in named_parameters_of(m):
            found.setdefault(id(p), name)
    return found


def with_and_without(seen: Observer, steps: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the tensors of optimisers with at least so many steps, and those of them that never got a gradient. One of zero counts."""
    received = {i for g in stepped(seen) for i in g.received} | seen.leaves.keys()
    trained = [p for g in stepped(seen) if g.steps >= steps for p in g.parameters if p.requires_grad]
    return trained, [p for p in trained if id(p) not in received]


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
    if fault := seen.evidence.undefined.fault():
        return finding("finite", *fault)
    return finding("finite", f"{len(seen.losses)} losses finite")


def moved_now(seen: Observer, p: torch.Tensor) -> bool:
    """Return whether it has changed since before training."""
    return id(p) in seen.snap and not torch.equal(p.detach().flatten()[:256], seen.snap[id(p)][1])
