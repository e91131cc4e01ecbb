"""Double precision on every device."""

from torch import Tensor


def to_double(tensor: Tensor) -> Tensor:
    """Return the tensor in double precision on the host, because devices such as Apple's MPS have no float64."""
    return tensor.cpu().double()
