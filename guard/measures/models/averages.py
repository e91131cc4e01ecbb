"""How much of the initial weights is left in an average of weights (EMA) when it is evaluated, and how much will be at the script's end.

The average is compared with the weights of the last step and those before the first one: where it is on the line between them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from trainworthy.guard.hooks.parameters import parameters_of

PARTS, ENTRIES = 8, 256
STEPS = 100_000
MOVED = 0.9  # most that an average may hold of the first weights to be one that was updated
ALIKE = 0.3  # least cosine between the changes of the average and of the weights


@dataclass
class Average:
    """An evaluation of weights that are those of no step."""

    model: int
    kind: str
    step: int
    start: float
    """Share of the initial weights."""


class Trail:
    """Some of the weights of each optimiser's last step."""

    def __init__(self) -> None:
        self.last: dict[int, Tensor] = {}
        self.order: dict[int, tuple[int, ...]] = {}  # model that trains -> ids of its parameters
        self.passed: set[tuple[float, ...]] = set()  # a few weights of each step: kept ones are no average
        # A few weights of the averages: the best of them may be loaded at the end
        self.averaged: set[tuple[float, ...]] = set()
        self.found: list[Average] = []
        self.stale: dict[str, int] = {}
        """Kind of an average whose batch norms have no statistics -> step of its last evaluation."""

    def step(self, parameters: list[Tensor]) -> None:
        """Note weights after a step."""
        chosen = parameters if len(parameters) <= PARTS else [*parameters[: PARTS // 2], *parameters[-PARTS // 2 :]]
        for p in chosen:
            self.last[id(p)] = p.detach().flatten()[:ENTRIES].clone()
        if len(self.passed) < STEPS:
            self.passed |= {signature(p) for p in chosen[:2]}

    def trains(self, module: nn.Module) -> None:
        """Note a model that was called with gradients."""
        if id(module) not in self.order:
            self.order[id(module)] = tuple(id(p) for p in parameters_of(module))

    def evaluated(self, module: nn.Module, twins: list[nn.Module], start: dict, step: int) -> None:
        """Compare an evaluated model with those of its kind that train. `start`: id of a parameter -> itself and its first values."""
        if len(self.found) >= 400:
            return
        mine = list(parameters_of(module))
        for twin in twins:
            ids = self.order.get(id(twin), ())
            known = [(p, i) for p, i in zip(mine, ids, strict=False) if i in self.last and i in start]
            known = [(p, i) for p, i in known if not torch.equal(self.last[i], start[i][1])]
            rows = [
                (p.detach().flatten()[:ENTRIES].float(), self.last[i].float(), start[i][1].float()) for p, i in known
            ]
            if len(ids) != len(mine) or not rows:
                continue
            now, last, first = (torch.cat(x) for x in zip(*rows, strict=True))
            marks = [signature(p) for p, _ in known]
            kept = any(m in self.passed for m in marks) or all(m in self.averaged for m in marks)
            if kept or torch.equal(last, first) or torch.equal(now, last) or torch.equal(now, first):
                continue
            if (share := share_left(now, last, first)) is not None:
                self.found.append(Average(id(module), type(module).__name__, step, share))
                self.averaged |= set(marks)
                if share < MOVED and without_statistics(module) and not without_statistics(twin):
                    self.stale[type(module).__name__] = step
            return


def without_statistics(module: nn.Module) -> bool:
    """Return whether all batch norms that use their statistics have those with which they were built: mean 0, variance 1."""
    norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and not m.training]
    norms = [m for m in norms if m.running_mean is not None]
    return bool(norms) and all(not m.running_mean.any() and bool((m.running_var == 1).all()) for m in norms)


def share_left(now: Tensor, last: Tensor, first: Tensor) -> float | None:
    """Return how much of the first weights is left in an average, if it moved as the weights did; `last`: their values."""
    weights_moved, average_moved = last.float() - first.float(), now.float() - first.float()
    if not float(torch.cosine_similarity(weights_moved, average_moved, 0)) > ALIKE:
        return None
    return 1 - float((weights_moved * average_moved).sum() / (weights_moved * weights_moved).sum())


def signature(p: Tensor) -> tuple[float, ...]:
    """Return a few values of a tensor, which identify its state."""
    return (p.numel(), *p.detach().flatten()[:4].float().tolist())


def buffers(trail: Trail) -> tuple[str, str] | None:
    """Return what was measured and its cause if an average of weights is evaluated with statistics that it never got."""
    for kind, step in trail.stale.items():
        return (
            f"the {kind} that is evaluated after step {step} has averaged weights, and its batch norms have the mean 0 and the variance 1 with which "
            "they were built",
            "the average leaves out the buffers: copy them at each update (parameters() has none, state_dict() has; "
            "AveragedModel(use_buffers=True) or update_bn())",
        )
    return None


def fault(found: list[Average], steps: int, whole: float) -> tuple[str, str] | None:
    """Return (what was measured, cause) if the last evaluated average holds too much of the first weights. `steps`: made so far; `whole`: in all."""
    if not found:
        return None
    one = found[-1]
    if one.step < steps or not 0 < one.start < 1:
        return None
    left = one.start ** (whole / one.step)
    if left < 0.6:
        return None
    rest = f"; after all {whole:.0f} it will be {left:.0%}" if whole > steps else ""
    return (
        f"the weights of the evaluation after step {one.step} of {steps} are an average that is {one.start:.0%} the initial weights{rest}",
        f"the decay of the average is that of a longer run: 1 / (1 - decay) must be well below {whole:.0f} steps, or the decay must be warmed up\n"
        "the average is updated once an epoch, and not after each step",
    )
