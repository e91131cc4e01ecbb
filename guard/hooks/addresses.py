"""Where the entries of a tensor are in memory: equal for a tensor and its view. Sparse tensors have no memory of their own."""

from torch import Tensor


def home_of(x: Tensor) -> int:
    """Return the address of the memory that a tensor shares with its views; for a tensor without one (sparse), a number of its own."""
    try:
        return x.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return -id(x)


def address_of(x: Tensor) -> int:
    """Return the address of a tensor's first entry; for a tensor without memory (sparse), a number of its own."""
    try:
        return x.data_ptr()
    except (NotImplementedError, RuntimeError):
        return -id(x)
