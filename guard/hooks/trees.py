"""The tensors in batches, arguments and outputs, which a script nests as it likes."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


def tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def as_tensor(x: Any) -> Any:
    """Return an array of numbers as a tensor, and anything else as it is."""
    return torch.from_numpy(np.ascontiguousarray(x)) if isinstance(x, np.ndarray) and x.dtype.kind in "fiub" else x


def entries(sample: Any) -> list[Tensor]:
    """Return the tensors of a sample that was not collated yet: data sets may return arrays."""
    return [x for x in map(as_tensor, tree_leaves(sample)) if isinstance(x, Tensor)]


def floats(tree: Any) -> list[Tensor]:
    return [x for x in tensors(tree) if x.is_floating_point()]


def first_float(args: tuple, kwargs: dict) -> Tensor | None:
    """Return the first argument of a call that is a floating-point tensor itself."""
    return next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.is_floating_point()), None)
