"""Train and eval mode of a module, and hooks, for a while."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
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


@contextmanager
def without_random_hooks(weights: Iterable[Tensor]) -> Iterator[None]:
    """Remove hooks on gradients that draw at random inside (noise, Neelakantan 2015): what they add is no part of the loss. Others stay."""
    removed = []
    for p in weights:
        hooks = p._backward_hooks or {}
        removed += [(hooks, key, hooks.pop(key)) for key in [k for k, hook in hooks.items() if _draws(hook, p)]]
    try:
        yield
    finally:
        for hooks, key, hook in removed:
            hooks[key] = hook


def _draws(hook: Callable[[Tensor], Tensor | None], p: Tensor) -> bool:
    """Return whether a hook makes two different gradients of the same one."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())), torch.no_grad():
        one, other = hook(torch.ones_like(p)), hook(torch.ones_like(p))
    return one is not None and other is not None and not torch.equal(one, other)
