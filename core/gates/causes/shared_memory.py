"""Finds objects of a stage (averages, references, targets) that share memory with the weights that train."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from trainworthy.core.recipe.stage import Stage

DEPTH = 4  # attributes and containers that are followed inside an object of `stage.state`


def shared(stage: Stage) -> dict[str, str]:
    """{kept object: names of trained parameters that share its memory}."""
    trained = {_memory(p): n for n, p in stage.parameters().items() if p.numel() and not p.is_meta}
    own = {id(p) for p in stage.model.parameters()}
    found: dict[str, list[str]] = {}

    def compare(what: str, tensor: Tensor) -> None:
        if tensor.numel() and not tensor.is_meta and (name := trained.get(_memory(tensor))):
            found.setdefault(what, []).append(name)

    kept = dict(stage.frozen_modules)
    if stage.ema_model is not None and stage.ema_model is not stage.model:
        kept["ema_model"] = stage.ema_model
    for name, module in kept.items():
        for tensor in (*module.parameters(), *module.buffers()):
            compare(name, tensor)
    inside = {id(m) for m in stage.model.modules()}
    kinds = {type(m) for m in stage.model.modules() if next(m.parameters(), None) is not None}
    skip = {id(stage), id(stage.model), *inside, *map(id, stage.optimizers.values()), *map(id, kept.values())}
    for name, one in stage.state.items():
        for module, tensor in _held(one, skip, DEPTH):
            if module is not None and type(module) in kinds:  # a copy of the net, not a wrapper around it
                for tensor in (*module.parameters(), *module.buffers()):
                    compare(f"state['{name}']", tensor)
            elif tensor is not None and id(tensor) not in own:  # an optimiser holds the parameters themselves
                compare(f"state['{name}']", tensor)
    return {k: v[0] + (f" and {len(v) - 1} more" if len(v) > 1 else "") for k, v in found.items()}


def _memory(tensor: Tensor) -> tuple[int, int]:
    try:
        return tensor.untyped_storage().data_ptr(), tensor.storage_offset()
    except RuntimeError:  # a tensor around others (quantised weights) has no memory of its own
        return id(tensor), 0


def _held(one: Any, skip: set[int], depth: int) -> Iterator[tuple[nn.Module | None, Tensor | None]]:
    """Modules and tensors that an object holds in its attributes, lists and dicts."""
    if id(one) in skip or depth < 0:
        return
    skip.add(id(one))
    if isinstance(one, Tensor):
        yield None, one
    elif isinstance(one, nn.Module):
        yield one, None
    elif isinstance(one, dict):
        for value in one.values():
            yield from _held(value, skip, depth - 1)
    elif isinstance(one, list | tuple):
        if len(one) <= 10_000:
            for value in one:
                yield from _held(value, skip, depth - 1)
    elif hasattr(one, "__dict__") and not isinstance(one, type) and not callable(one):
        for value in list(vars(one).values()):
            yield from _held(value, skip, depth - 1)
