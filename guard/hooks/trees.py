"""The tensors in batches, arguments and outputs, which a script nests as it likes."""

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves


def tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def floats(tree: Any) -> list[Tensor]:
    return [x for x in tensors(tree) if x.is_floating_point()]


def first_float(args: tuple, kwargs: dict) -> Tensor | None:
    """Return the first argument of a call that is a floating-point tensor itself."""
    return next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.is_floating_point()), None)
