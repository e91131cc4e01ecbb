"""Parts of policies: MLPs, and running statistics that are saved with the weights."""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from trainworthy.core.base import seeds
from trainworthy.core.loop.optim import exact


class Running(nn.Module):
    """Running mean and variance of all rows (n, size) (Chan 1983); 0 and 1 before the first. Reading does not change them.

    Cached with them, because every forward pass needs them and they change once per rollout: `std` (size,), 1 for constant columns, and
    `rms`, the root mean square (size,), 1 before the first rows and if all are 0.
    """

    def __init__(self, size: int):
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        for name in ("var", "std", "rms"):
            self.register_buffer(name, torch.ones(size))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def update(self, rows: Tensor) -> None:
        """Add rows (n, size)."""
        rows, n, seen = exact(rows), len(rows), self.count.item()
        mean, var = rows.mean(0), rows.var(0, correction=0)
        delta, total = mean - exact(self.mean), n + seen
        together = (exact(self.var) * seen + var * n + delta.square() * seen * n / total) / total
        self.mean.add_((delta * n / total).to(self.mean))
        self.var.copy_(together)
        self.count.add_(n)
        self.std.copy_(_root(self.var))
        self.rms.copy_(_root(self.var + self.mean.square()))


def _root(square: Tensor) -> Tensor:
    """Return values (size,), with 1 instead of 0."""
    return torch.where(square > 1e-8, square, torch.ones_like(square)).sqrt()


class Side(nn.ModuleList):
    """Parallel MLPs with the same input (B, n) and one output each: (nets, B)."""

    def forward(self, x: Tensor, *, frozen: bool = False) -> Tensor:
        """`frozen`: gradients reach `x`, but not these nets."""
        return torch.stack([(untaught(net, x) if frozen else net(x)).squeeze(-1) for net in self])


class Layers(nn.Sequential):
    """Return the layers of a Sequential: in a small net calling the Sequential costs as much as its arithmetic."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            hooked = layer._forward_pre_hooks or layer._forward_hooks or layer._backward_hooks
            x = layer(x) if hooked else layer.forward(x)
        return x


def untaught(net: nn.Sequential, x: Tensor) -> Tensor:
    """Apply an `mlp` without gradients for its weights. `torch.func.functional_call` does the same with six times the overhead."""
    for layer in net:
        linear = isinstance(layer, nn.Linear)
        x = F.linear(x, layer.weight.detach(), layer.bias.detach()) if linear else layer(x)
    return x


def mlp(*sizes: int, activation: type[nn.Module] = nn.Tanh) -> Layers:
    """Linear layers with an activation in between, orthogonal weights (Andrychowicz 2021), biases 0."""
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        linear = nn.Linear(a, b)
        nn.init.orthogonal_(linear.weight, 2**0.5 if b != sizes[-1] else 1.0)
        nn.init.zeros_(linear.bias)
        layers += [linear, activation()]
    return Layers(*layers[:-1])


def built_again(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Return a policy as it was before training, built from the run's seed: no copy of it is kept while the run trains."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        seeds.seed_global(seed, "build")
        return make().eval()
