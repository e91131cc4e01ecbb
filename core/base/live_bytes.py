"""Counts the bytes in live tensors, and what they are, operation by operation."""

import functools
import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Sum and peak of the bytes in floating-point storages that operations inside have made and nobody has freed.

    A weak reference to each storage tells when it is freed, so the number is a sum of storages, each once, and the same
    on every machine. Left out: integers (pictures as bytes, tokens: the data set), file-backed storages (the system may
    page them out) and temporary memory inside one kernel.
    """

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self.sizes: dict[int, tuple[weakref.ref, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in tree_leaves(out):
            if isinstance(one, Tensor) and one.is_floating_point() and one.device.type != "meta":
                self.count(one)
        return out

    def count(self, tensor: Tensor) -> None:
        """Count the storage of `tensor` from here on, if it is not yet counted."""
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # a sparse tensor has none
            return
        key, size = id(storage), storage.nbytes()
        if not isinstance(size, int):  # a size that a loaded program leaves open: it describes a tensor, and holds none
            return
        if storage.filename is not None or (key in self.sizes and self.sizes[key][0]() is storage):
            return
        self.sizes[key] = (weakref.ref(storage, functools.partial(self._freed, key)), size)
        self.live += size
        self.peak = max(self.peak, self.live)

    def forget(self, tensor: Tensor) -> None:
        """Leave the storage of `tensor` out from here on."""
        key = id(tensor.untyped_storage())
        if key in self.sizes:
            self._freed(key, self.sizes[key][0])

    def _freed(self, key: int, ref: weakref.ref) -> None:
        if key in self.sizes and self.sizes[key][0] is ref:
            self.live -= self.sizes.pop(key)[1]

    def restart(self) -> int:
        """Begin a new peak here; return what is alive now."""
        self.peak = self.live
        return self.live
