"""Tensors of which this process holds a part (torch's DTensor), handled like whole ones."""

from typing import Any

from torch import Tensor


def is_sharded(tensor: Any) -> bool:
    """Return whether this process holds only a part of the tensor."""
    return hasattr(tensor, "_local_tensor")


def local(tensor: Any) -> Tensor:
    """Return the part of a tensor that this process holds; a whole tensor itself."""
    return tensor._local_tensor if is_sharded(tensor) else tensor  # to_local() would add an operation to the graph


def like(value: Tensor, target: Any) -> Tensor:
    """Return this process's part of a whole tensor if `target` is sharded, else the tensor itself."""
    if not is_sharded(target) or is_sharded(value):
        return value
    from torch.distributed.tensor import distribute_tensor

    on_device = value.to(target.device, target.dtype)
    return distribute_tensor(on_device, target.device_mesh, target.placements, src_data_rank=None)
