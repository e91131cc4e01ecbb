"""Parameters that a module keeps outside of its registry, in a plain list or dict: no optimiser, checkpoint or export knows them."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

REGISTRIES = ("_parameters", "_buffers", "_modules")


def hidden_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return {path: parameter} of what attributes of `model`'s modules hold (lists, tuples, dicts) and `model.parameters()` does not."""
    known, found = {id(p) for p in model.parameters()}, {}
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            if key in REGISTRIES or not isinstance(value, list | tuple | dict):
                continue
            where = f"{path}.{key}".lstrip(".")
            for i, held in enumerate(tree_leaves(value)):
                rows = {"": held} if isinstance(held, nn.Parameter) else {}
                rows |= {f".{k}": p for k, p in held.named_parameters()} if isinstance(held, nn.Module) else {}
                found |= {f"{where}[{i}]{k}": p for k, p in rows.items() if id(p) not in known and p.requires_grad}
    return found


def reached(loss: Callable[[], Tensor], parameters: dict[str, nn.Parameter]) -> list[str]:
    """Return which of `parameters` get a gradient from `loss()`, one entry for each tensor."""
    own = {id(p): k for k, p in reversed(parameters.items())}  # the first name of a tensor that is held twice
    value = loss()
    if not own or not value.requires_grad:
        return []
    tensors = {k: parameters[k] for k in reversed(own.values())}
    gradients = torch.autograd.grad(value, list(tensors.values()), allow_unused=True)
    return [k for k, g in zip(tensors, gradients, strict=True) if g is not None]
