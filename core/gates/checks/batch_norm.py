"""Batch norm (Ioffe 2015) trains with batch statistics and evaluates with running ones. This gate checks that the two
agree."""

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from trainworthy.core.base.modes import hooked
from trainworthy.core.base.verdict import Finding, Skip
from trainworthy.core.gates import gate
from trainworthy.core.gates.gate import GateContext
from trainworthy.core.loop.run import Rehearsal, Run
from trainworthy.core.recipe.stage import Stage

FEW, LEFT = 2, 0.05


def layers(model: nn.Module) -> dict[str, _BatchNorm]:
    """Return every batch norm that keeps running statistics."""
    return {n: m for n, m in model.named_modules() if isinstance(m, _BatchNorm) and m.track_running_stats}


def fixed(model: nn.Module) -> dict[str, nn.Module]:
    """Return every layer that has such statistics and never updates them (torchvision's FrozenBatchNorm2d, a hub
    model's own class)."""
    held = lambda m: all(isinstance(getattr(m, k, None), torch.Tensor) for k in ("running_mean", "running_var"))  # noqa: E731
    return {n: m for n, m in model.named_modules() if held(m) and not isinstance(m, _NormBase)}


def new(module: nn.Module) -> bool:
    """Return whether its statistics are still the initial 0 and 1."""
    return not module.running_mean.any() and bool((module.running_var == 1).all())


@contextlib.contextmanager
def by_batch(model: nn.Module) -> Iterator[None]:
    """Inside, batch norm normalises with batch statistics in every mode, and no running value changes."""

    def train(module: _BatchNorm, inputs: tuple[torch.Tensor, ...]) -> None:
        # Torch raises for a channel with one value, which has no variance
        module.train(inputs[0].numel() > inputs[0].shape[1])

    found = layers(model).values()
    kept = [(m, m.momentum, m.num_batches_tracked.clone()) for m in found]
    for m in found:
        m.momentum = 0.0
    try:
        with hooked(m.register_forward_pre_hook(train) for m in found):
            yield
    finally:
        for m, momentum, tracked in kept:
            m.momentum = momentum
            m.num_batches_tracked.copy_(tracked)


@gate(
    "batch-norm",
    rows="V7",
    title="batches are large enough for batch norm's statistics, and the run is long enough for the running ones",
    reads="data model expect train",
    compares_ranks=True,
)
def batch_norm(context: GateContext) -> Finding:
    """Run one step of `train()` on a batch of the run's size, divided as in the run, and count the samples that each
    layer normalises over. Running statistics must forget their initial value within the run: (1 -
    momentum)^(micro-batches) of it remains. Layers with fixed statistics must have some."""
    cfg, (_, probe) = context.cfg, context.look()
    constant = fixed(probe.model)
    empty = [n for n, m in constant.items() if new(m)]
    if empty:
        return Finding(False, f"{len(empty)} of {len(constant)} layers normalise with fixed initial statistics (mean 0, variance 1)",
                       "statistics of trained weights, or layers that compute their own",
                       "frozen before the weights were loaded, or a net from scratch, whose statistics must not be frozen")  # fmt: skip
    if not layers(probe.model) and constant:
        return Finding(
            True,
            f"{len(constant)} layers normalise with fixed statistics, none computes its own",
            "statistics that were computed from data",
        )
    if not layers(probe.model):
        raise Skip("no batch norm")
    stage, seen = _one_step(context)
    # Statistics from a file are right from the first step; new ones start at 0 and 1.
    made_here = [n for n, m in layers(probe.model).items() if new(m)]
    if not seen:
        raise Skip("batch norm trains in eval mode, so it uses no statistics of a batch")
    least = min(min(sizes) for sizes in seen.values())
    updates = Run(cfg, context.accelerator).total_steps(stage) if context.sized else math.inf
    momenta = {
        n: m.momentum for n, m in layers(stage.model).items() if n in seen and n in made_here and m.momentum is not None
    }
    left = {n: (1 - m) ** (updates * len(seen[n])) for n, m in momenta.items()}
    slow = max(left, key=left.get, default="")
    wrong, enough = [], 0
    if least <= FEW:
        wrong.append(f"batch norm computes its statistics over {least} sample{'s' * (least > 1)} at a time")
    if slow and left[slow] > LEFT:
        length = f"the {updates:,} steps of the run" if context.sized else "any number of steps"
        wrong.append(f"after {length} {left[slow]:.0%} of the running statistics of {slow} are still "
                     f"their initial value (momentum {momenta[slow]:g})")  # fmt: skip
        if momenta[slow]:
            enough = math.ceil(math.log(LEFT) / math.log1p(-momenta[slow]) / len(seen[slow]))
    measured = f"{len(seen)} layers over {least} samples or more at a time"
    if slow:
        measured += f"; at most {left[slow]:.0e} of the initial running statistics is left at the end"
    small = "micro-batches are too small for batch norm: fewer --train.accumulate, SyncBatchNorm over processes, GroupNorm, or frozen statistics"
    brief = "the momentum is too low for this run"
    if enough:
        brief += f": use {enough:,} steps or more, or a momentum of 0.1"
    return Finding(
        not wrong, "; ".join(wrong) if wrong else measured,
        f"more than {FEW} samples at a time; at most {LEFT:.0%} of the initial statistics left",
        f"{small}\n{brief}" if least <= FEW else f"{brief}\n{small}",
        evidence={"samples": seen, "left": left},
    )  # fmt: skip


def _one_step(context: GateContext) -> tuple[Stage, dict[str, list[int]]]:
    """Train one step; return the stage, and for each layer the samples of each of its forwards in train mode."""
    run, stage = context.build(Rehearsal(steps=1, batch_size=context.cfg.train.batch_size, peak=True))
    seen: dict[str, list[int]] = {}

    def count(name: str):
        def hook(module: _BatchNorm, inputs: tuple[torch.Tensor, ...]) -> None:
            if module.training and torch.is_grad_enabled():
                over = run.world if isinstance(module, nn.SyncBatchNorm) else 1
                seen.setdefault(name, []).append(len(inputs[0]) * over)

        return hook

    with hooked(m.register_forward_pre_hook(count(name)) for name, m in layers(stage.model).items()):
        context.train(context.cfg, run, stage)
    return stage, seen
