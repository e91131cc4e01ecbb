"""Reads evenly spaced samples of a data set, for checks that compare training with its evaluations."""

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import IterableDataset

Item = TypeVar("Item")


def as_tensors(sample: Any) -> list[Tensor]:
    """Return the numbers, arrays and tensors of a sample as tensors on the host."""
    found = (x for x in tree_leaves(sample) if isinstance(x, (Tensor, int, float)) or hasattr(x, "dtype"))
    return [torch.as_tensor(x).detach().cpu() for x in found]


def spaced(
    data: Any, most: int, limit: float, read: Callable[[Any], Item | None], *, whole: bool = False
) -> list[Item]:
    """Return `read` of at most `most` evenly spaced samples. Nothing of a stream, if `read` returns None for one of them (it is of another
    kind), or if the time is over (`limit`, as time.monotonic()). `whole`: nothing either if there are more samples."""
    if isinstance(data, IterableDataset) or not hasattr(data, "__len__") or (whole and len(data) > most):
        return []
    found = []
    for i in range(0, len(data), max(1, -(-len(data) // most))):
        if time.monotonic() > limit or (item := read(data[i])) is None:
            return []
        found.append(item)
    return found
