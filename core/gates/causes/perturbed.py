"""Weights that a loop changes within a step and sets back before its update, as sharpness-aware minimisation does (SAM, Foret 2021): the
gradient of the update is that at the changed weights."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from trainworthy.core.base.dtensor import local

ENTRIES = 64  # of each tensor, which are compared
BACK = 0.01  # of the change: weights that are as near as this to the first ones are set back


class Perturbed:
    """Follows the weights from the first forward pass of a step to its last one."""

    def __init__(self) -> None:
        self._first: Tensor | None = None
        self._weights: dict[str, Tensor] = {}

    def forward(self, trained: dict[str, nn.Parameter]) -> None:
        """Note the weights of a forward pass with gradients."""
        now = _some(trained)
        self._first = now if self._first is None else self._first
        moved = not torch.equal(self._first, now)
        self._weights = {n: p.detach().clone() for n, p in trained.items()} if moved else {}

    def stepped(self) -> None:
        self._first, self._weights = None, {}

    def set_back(self, trained: dict[str, nn.Parameter]) -> bool:
        """Return whether the last forward pass had other weights than the first one, which are those of now."""
        now, away, first = _some(trained), _some(self._weights), self._first
        if first is None or not first.shape == now.shape == away.shape:
            return False
        left, gone = (float((x - first).square().sum()) for x in (now, away))
        return left <= BACK**2 * gone

    @contextmanager
    def again(self, trained: dict[str, nn.Parameter]) -> Iterator[None]:
        """Set the weights to those of the last forward pass inside."""
        own = {n: p.detach().clone() for n, p in trained.items()}
        _copy(trained, self._weights)
        try:
            yield
        finally:
            _copy(trained, own)


def _some(weights: dict[str, Tensor]) -> Tensor:
    """Return some entries of all weights as one vector: a comparison then waits for the device once."""
    parts = [local(w.detach()).flatten()[:ENTRIES].float() for w in weights.values()]
    return torch.cat([x.to(parts[0].device) for x in parts]) if parts else torch.zeros(0)


@torch.no_grad()
def _copy(to: dict[str, nn.Parameter], values: dict[str, Tensor]) -> None:
    for n, value in values.items():
        to[n].copy_(value)
