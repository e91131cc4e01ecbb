"""Modules that normalise by their batch while they train, and by statistics of earlier batches after that."""

import functools

from torch import nn
from trainworthy.guard.measures.records import NORMS


def has_statistics(module: nn.Module) -> bool:
    """Return whether a module is a batch norm with running statistics: torch's, or a class of the script that is named after a norm."""
    if isinstance(module, NORMS):
        return bool(module.track_running_stats)
    return _own_norm(type(module)) and any("running" in name and x is not None for name, x in module._buffers.items())


@functools.cache
def _own_norm(kind: type) -> bool:
    return "norm" in kind.__name__.lower() and not kind.__module__.startswith("torch.")
