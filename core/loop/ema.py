"""An exponential moving average of a model's weights (Polyak & Juditsky 1992), with one fused update per step."""

import copy
from typing import Any

import torch
from torch import nn
from trainworthy.core.base.dtensor import local
from trainworthy.core.base.errors import UserError


class Ema:
    """`model` holds the average of parameters and buffers; call `update(trained)` after every optimiser step.

    The decay is ramped: min(decay, (1 + n) / (10 + n)) after n updates. Without the ramp, an average with decay 0.999
    still has 82% initial weights after 200 steps. Counters and other integers are copied.
    """

    def __init__(self, model: nn.Module, decay: float):
        if not 0 <= decay < 1:
            raise UserError("the decay of a weight average is between 0 and 1", got=decay, needed="[0, 1), 0.999 or so")
        self.model = copy.deepcopy(model).requires_grad_(False).eval()
        self.decay, self.updates = decay, 0

    @torch.no_grad()
    def update(self, trained: nn.Module) -> None:
        """average += (1 - decay) * (trained - average)."""
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        self.updates += 1
        mine, theirs = _tensors(self.model), _tensors(trained)
        averaged = [a.is_floating_point() for a in mine]
        torch._foreach_lerp_([a for a, f in zip(mine, averaged, strict=True) if f],
                             [b for b, f in zip(theirs, averaged, strict=True) if f], 1 - decay)  # fmt: skip
        for a, b, f in zip(mine, theirs, averaged, strict=True):
            if not f:
                a.copy_(b)

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, "model": self.model.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates = state["updates"]
        self.model.load_state_dict(state["model"])


def _tensors(model: nn.Module) -> list[torch.Tensor]:
    """Parameters and buffers, tied ones once, from a single walk over the modules (two walks take twice the time). Of
    sharded ones, the part that this process holds."""
    every = (t for m in model.modules() for t in (*m._parameters.values(), *m._buffers.values()) if t is not None)
    return [local(t) for t in {id(t): t for t in every}.values()]
