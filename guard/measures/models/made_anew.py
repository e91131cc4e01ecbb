"""Layers that a model creates inside `forward()`: they are other random weights at every call, and no optimiser has them."""

from typing import Any

from torch import nn
from trainworthy.guard.hooks.parameters import parameters_of

CALLS = 3  # training steps at each of which a layer of this kind was another object with other weights


class MadeAnew:
    """Counts modules that run inside a model's call and are no part of it."""

    def __init__(self) -> None:
        self.parts: dict[int, set[int]] = {}  # a model -> its modules
        self.seen: dict[tuple, dict[int, tuple[set[int], list[float]]]] = {}
        """Kind -> module -> steps, entries of its weights."""

    def call(self, module: nn.Module, root: nn.Module, step: int) -> None:
        """Note a module that runs within a call of `root` with gradients. The caller keeps it alive, so its id is its own."""
        if id(module) in self.parts.get(id(root), ()):
            return
        self.parts[id(root)] = {id(m) for m in root.modules()}
        if id(module) in self.parts[id(root)]:
            return
        drawn = [p for p in parameters_of(module, recurse=False) if p.requires_grad and p.dim() > 1 and p.numel() > 3]
        if not drawn:
            return
        kind: tuple[Any, ...] = (type(module).__name__, *(tuple(p.shape) for p in drawn))
        steps, _ = self.seen.setdefault(kind, {}).setdefault(id(module), (set(), drawn[0].flatten()[:4].tolist()))
        steps.add(step)

    def fault(self) -> str:
        """Name the kinds of layers that were another object with other weights at each step."""
        found = []
        for (name, shape, *_), modules in self.seen.items():
            once = [(min(steps), entries) for steps, entries in modules.values() if len(steps) == 1]
            others = len({tuple(entries) for _, entries in once}) == len(once) == len(modules)
            if others and len({step for step, _ in once}) >= CALLS:
                found.append(f"{name} {shape}")
        return ", ".join(found[:3])
