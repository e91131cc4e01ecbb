"""Modules whose mode makes a difference: norms by their batch or by statistics of earlier ones, and classes that ask for it."""

import functools
import inspect

from torch import nn
from trainworthy.guard.measures.records import NORMS

LIBRARIES = ("torch", "torchvision", "timm", "transformers", "diffusers", "peft")


def has_statistics(module: nn.Module) -> bool:
    """Return whether a module is a batch norm with running statistics: torch's, or a class of the script that is named after a norm."""
    if isinstance(module, NORMS):
        return bool(module.track_running_stats)
    return _own_norm(type(module)) and any("running" in name and x is not None for name, x in module._buffers.items())


@functools.cache
def _own_norm(kind: type) -> bool:
    return "norm" in kind.__name__.lower() and not kind.__module__.startswith("torch.")


@functools.cache
def reads_its_mode(kind: type) -> bool:
    """Return whether a class of the script's own reads `self.training` in its `forward` (a codebook that is updated while it trains)."""
    if kind.__module__.split(".")[0] in LIBRARIES:
        return False
    try:
        return "self.training" in inspect.getsource(kind.forward)
    except (AttributeError, OSError, TypeError):
        return False
