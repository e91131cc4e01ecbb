"""A module's own parameters. A class may give `parameters()` another meaning (MAML's learners return a list of fast weights)."""

from collections.abc import Iterator

from torch import nn


def named_parameters_of(module: nn.Module, recurse: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
    """Return names and parameters as `nn.Module` itself lists them."""
    return nn.Module.named_parameters(module, recurse=recurse)


def parameters_of(module: nn.Module, recurse: bool = True) -> Iterator[nn.Parameter]:
    """Return the parameters as `nn.Module` itself lists them."""
    return (p for _, p in named_parameters_of(module, recurse))
