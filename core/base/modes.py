"""Train and eval mode of a module, and hooks, for a while."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from torch import nn
from torch.utils.hooks import RemovableHandle


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


@contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Register hooks (a generator registers them one by one) inside; remove them after, also those before one that raised."""
    with ExitStack() as registered:
        for handle in handles:
            registered.enter_context(handle)
        yield
