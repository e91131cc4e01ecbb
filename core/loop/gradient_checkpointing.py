"""Activation checkpointing: the backward pass computes the activations of a block again instead of keeping them."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from trainworthy.core.base.errors import UserError
from trainworthy.core.recipe.stage import Stage

FLAG = "--train.gradient-checkpointing"
SWITCHES = ("activation_checkpointing_enable", "gradient_checkpointing_enable", "enable_gradient_checkpointing")
"""Of models of transformers (since 5.23, and before) and of diffusers, which know their blocks."""


def apply(stage: Stage) -> None:
    """Checkpoint the blocks of the model: those that its library knows, else those that `shard_units` names. Random draws
    inside a block (dropout) are repeated, so gradients do not change. Evaluations store no activations anyway."""
    own = [net for net in outermost(stage.model) if switched(net)]
    if own:
        return
    units = stage.shard_units(stage.model) if stage.shard_units is not None else []
    if not units:
        raise UserError(f"{FLAG}: the stage {stage.name} has no blocks", got=type(stage.model).__name__, needed="a model of "
                        "transformers or diffusers, or Stage(shard_units=...) that names blocks",
                        next="--train.accumulate divides the batch instead")  # fmt: skip
    for unit in units:
        _assert_repeatable(unit)
        if not isinstance(unit.forward, Recomputed):
            unit.forward = Recomputed(unit, unit.forward)


class Recomputed:
    """The forward of a block, checkpointed where it trains. A class, so that a copy of the block gets its own."""

    def __init__(self, block: nn.Module, forward: Callable):
        self.block, self.forward = block, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.block.training and torch.is_grad_enabled():
            return checkpoint(self.forward, *args, use_reentrant=False, **kwargs)
        return self.forward(*args, **kwargs)


def outermost(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost models of a library that train."""
    below: set[int] = set()
    for net in model.modules():
        if id(net) not in below and any(callable(getattr(net, switch, None)) for switch in SWITCHES):
            below |= {id(m) for m in net.modules()}
            if any(p.requires_grad for p in net.parameters()):
                yield net


def switched(net: nn.Module) -> bool:
    """Switch checkpointing on in a model of a library; False if it does not support it."""
    _assert_repeatable(net)
    switch = next(s for s in SWITCHES if callable(getattr(net, s, None)))
    try:
        getattr(net, switch)(*(() if switch == SWITCHES[-1] else ({"use_reentrant": False},)))
    except ValueError:
        return False
    return True


def _assert_repeatable(net: nn.Module) -> None:
    """Raise UserError if computing twice would change the net: batch norm counts each batch in its statistics."""
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats for m in net.modules()):
        raise UserError(f"{FLAG} would update batch norm's statistics twice in each step", got="batch norm inside a block",
                        needed="other norms: --norm group or frozen where the recipe has them",
                        next="--train.accumulate divides the batch instead")  # fmt: skip
