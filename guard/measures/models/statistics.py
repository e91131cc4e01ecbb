"""Modules that normalise by their batch while they train, and by statistics of earlier batches after that."""

from torch import nn
from trainworthy.guard.measures.records import NORMS


def has_statistics(module: nn.Module) -> bool:
    """Return whether a module is a batch norm with running statistics: torch's, or a class of the script that is named after a norm."""
    if isinstance(module, NORMS):
        return bool(module.track_running_stats)
    own = "norm" in type(module).__name__.lower() and not type(module).__module__.startswith("torch.")
    return own and any("running" in name and x is not None for name, x in module._buffers.items())
