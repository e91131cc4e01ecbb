"""Parts of policies: plain nets, and normalisation statistics that are updated during a run and saved with the
weights."""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from trainworthy.core.loop.optim import exact


class Running(nn.Module):
    """Mean and variance of all rows (n, size) it was ever given (Chan 1983). Reading never moves them; 0 and 1 before the first.

    With them, since every forward asks for them and they move once a unit: `std` (size,), 1 where nothing varies, and `rms`, the
    root of the mean square (size,), 1 before the first rows and where all were 0.
    """

    def __init__(self, size: int):
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        for name in ("var", "std", "rms"):
            self.register_buffer(name, torch.ones(size))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def update(self, rows: Tensor) -> None:
        """Take in rows (n, size)."""
        rows, n, seen = exact(rows), len(rows), self.count.item()
        mean, var = rows.mean(0), rows.var(0, correction=0)
        apart, total = mean - exact(self.mean), n + seen
        together = (exact(self.var) * seen + var * n + apart.square() * seen * n / total) / total
        self.mean.add_((apart * n / total).to(self.mean))
        self.var.copy_(together)
        self.count.add_(n)
        self.std.copy_(_root(self.var))
        self.rms.copy_(_root(self.var + self.mean.square()))


def _root(square: Tensor) -> Tensor:
    """(size,); 1 where there is nothing."""
    return torch.where(square > 1e-8, square, torch.ones_like(square)).sqrt()


class Side(nn.ModuleList):
    """Nets side by side, each an `mlp`, that read the same (B, n) and say a number each: (nets, B)."""

    def forward(self, x: Tensor, *, still: bool = False) -> Tensor:
        """`still`: what comes of it teaches whatever made `x`, but not these nets."""
        return torch.stack([(untaught(net, x) if still else net(x)).squeeze(-1) for net in self])


class Layers(nn.Sequential):
    """What it is made of, one after another: in a small net a module's call takes as long as the arithmetic of its layer."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            hooked = layer._forward_pre_hooks or layer._forward_hooks or layer._backward_hooks
            x = layer(x) if hooked else layer.forward(x)
        return x


def untaught(net: nn.Sequential, x: Tensor) -> Tensor:
    """An `mlp` whose weights get no gradient; `torch.func.functional_call` is the same in six times the overhead."""
    for layer in net:
        linear = isinstance(layer, nn.Linear)
        x = F.linear(x, layer.weight.detach(), layer.bias.detach()) if linear else layer(x)
    return x


def mlp(*sizes: int, activation: type[nn.Module] = nn.Tanh) -> Layers:
    """Layers with an activation between, orthogonal weights (Andrychowicz 2021), biases 0."""
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        linear = nn.Linear(a, b)
        nn.init.orthogonal_(linear.weight, 2**0.5 if b != sizes[-1] else 1.0)
        nn.init.zeros_(linear.bias)
        layers += [linear, activation()]
    return Layers(*layers[:-1])
