"""Batches that are objects, opened for torch's pytree: dictionaries by another name (`BatchEncoding` of transformers), and classes
whose attributes are the tensors (`batch.src`, `batch.trg`; dataclasses)."""

import contextlib
from collections import UserDict
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import _deregister_pytree_node, register_pytree_node, tree_leaves
from trainworthy.guard.hooks.patches import undo_with

LONG = 4096  # entries of an attribute that is no part of a batch


class Shell:
    """What such a batch is without its values."""

    def __init__(self, batch: Any):
        self.cls, self.keys = type(batch), tuple(values_of(batch))
        self.rest = {k: v for k, v in vars(batch).items() if k != "data"} if isinstance(batch, UserDict) else {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shell) and (self.cls, self.keys) == (other.cls, other.keys)

    def __hash__(self) -> int:
        return hash((self.cls, self.keys))

    def __repr__(self) -> str:
        return f"{self.cls.__name__}{self.keys}"

    def filled(self, values: Any) -> Any:
        """Return a batch of this kind with other values."""
        batch, own = self.cls.__new__(self.cls), dict(zip(self.keys, values, strict=True))
        vars(batch).update(self.rest | {"data": own} if isinstance(batch, UserDict) else own)
        return batch


def values_of(batch: Any) -> dict:
    """Return the entries of a dictionary, or the attributes of another object."""
    return batch.data if isinstance(batch, UserDict) else vars(batch)


def holds_tensors(x: Any) -> bool:
    """Return whether an object's own attributes are tensors of several samples."""
    library = type(x).__module__.partition(".")[0]
    if isinstance(x, (Tensor, nn.Module, type)) or library in ("builtins", "torch", "numpy"):
        return False
    held = list(getattr(x, "__dict__", {}).values())
    if any(isinstance(v, (list, tuple, dict)) and len(v) > LONG for v in held):  # the whole data set
        return False
    return sum(isinstance(v, Tensor) and v.dim() > 0 for v in held) > 1


def opened(batch: Any) -> Any:
    """Return the batch; `tree_leaves` finds the tensors in it, until the patches are removed."""
    for _ in range(4):  # one in another
        leaves = tree_leaves(batch)
        closed = {type(x) for x in leaves if isinstance(x, UserDict) or holds_tensors(x)}
        for cls in closed:
            name = f"{cls.__module__}.{cls.__qualname__}"
            register_pytree_node(
                cls,
                lambda x: (list(values_of(x).values()), Shell(x)),
                lambda v, s: s.filled(v),
                serialized_type_name=name,
            )
            undo_with(lambda cls=cls: closing(cls))
        if not closed:
            break
    return batch


def closing(cls: type) -> None:
    """Take a class out of torch's registry, where that is possible."""
    with contextlib.suppress(AttributeError, KeyError):
        _deregister_pytree_node(cls)
