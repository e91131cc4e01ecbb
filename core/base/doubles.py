"""Double precision on every device: Apple's MPS, for one, has no float64."""

import torch
from torch import Tensor

NO_DOUBLES = {"mps"}
"""Kinds of devices without float64."""


def to_double(tensor: Tensor) -> Tensor:
    """Return the tensor in double precision on the host. Its operands must be on the host, too."""
    return tensor.cpu().double()


def exact(tensor: Tensor) -> Tensor:
    """Return the tensor in double precision, or in the best precision of its device."""
    return tensor.float() if tensor.device.type in NO_DOUBLES else tensor.double()


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return doubles of the host on a device, in its best precision."""
    return (tensor.float() if device.type in NO_DOUBLES else tensor).to(device)
