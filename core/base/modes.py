"""Train and eval mode of a module for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Set train or eval mode inside; restore every module's own mode after."""
    modes = [(m, m.training) for m in model.modules()]
    model.train() if training else model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
