"""Compares the time that a net gets with pure noise, when samples are drawn, with the times at which training gave it noise.

Sampling from a diffusion model starts from pure noise. If the net gets a time there at which its training inputs held hardly any noise, the
sampling loop runs backwards in time.
"""

import weakref
from collections import deque

import torch
from torch import Tensor, nn
from trainworthy.core.base.correlation import spearman
from trainworthy.core.base.doubles import to_double
from trainworthy.guard.hooks.addresses import address_of
from trainworthy.guard.hooks.trees import tensors

CALLS = 64  # training calls that are read
ENTRIES = 32  # least size of a sample
NEAR = 0.1  # fraction of the training calls: those whose times are closest to the first time of sampling
LITTLE, MUCH = 0.35, 0.65  # share of noise in an input, from 0 to 1
ORDERED = 0.8  # rank correlation of time and noise
FEWEST = 256


class Sampling:
    """Records time and share of noise of each training input, and the time that the net gets with pure noise."""

    def __init__(self) -> None:
        self.draws: deque = deque(maxlen=8)
        self.calls = 0
        self.noised: dict[int, list[tuple[Tensor, Tensor]]] = {}  # model -> times, shares of noise
        self.starts: dict[int, list[float]] = {}  # model -> times that it got with pure noise

    def drew(self, out: Tensor) -> None:
        """Record noise that the script drew."""
        if isinstance(out, Tensor) and out.dim() > 1 and out[0].numel() >= ENTRIES:
            self.draws.append(weakref.ref(out))

    def call(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Record a model's call on samples (N, ...) with one time for each, or one for all."""
        given = tensors((args, kwargs))
        x = next((v for v in given if v.is_floating_point() and v.dim() > 1 and v[0].numel() >= ENTRIES), None)
        if x is None or not self.draws:
            return
        times = [v for v in given if v is not x and v.numel() in (1, len(x)) and v.dim() < 3 and not v.requires_grad]
        noise = [n for ref in self.draws if (n := ref()) is not None and n.shape == x.shape]
        if len(times) != 1 or not noise:
            return
        time = to_double(times[0].detach().flatten()).expand(len(x))
        if torch.is_grad_enabled():
            if (
                self.calls < CALLS
                and times[0].numel() == len(x)
                and not any(address_of(n) == address_of(x) for n in noise)
            ):
                self.calls += 1
                self.noised.setdefault(id(module), []).append((time, max((share(x, n) for n in noise), key=explained)))
        elif any(address_of(n) == address_of(x) for n in noise) and bool((time == time[0]).all()):
            self.starts.setdefault(id(module), []).append(float(time[0]))

    def fault(self, alike: dict[int, int]) -> tuple[str, str] | None:
        """Return what was measured and its cause. `alike`: id of a model that samples (an EMA) -> id of the model of its shapes that trains."""
        for module, start in self.starts.items():
            rows = self.noised.get(alike.get(module, module), [])
            if sum(len(t) for t, _ in rows) < FEWEST or max(start) > min(start):
                continue
            time, noise = (torch.cat(v) for v in zip(*rows, strict=True))
            order = (time - start[0]).abs().argsort()
            near = order[: max(8, int(NEAR * len(order)))]
            far = order[-len(near) :]
            here, there = float(noise[near].mean()), float(noise[far].mean())
            if here < LITTLE and there > MUCH and abs(spearman(time, noise)) > ORDERED:
                return (
                    f"sampling begins with noise alone and tells the net time {start[0]:.3g}, where training's inputs were {here:.0%} noise; far "
                    f"from it, at {float(time[far].mean()):.3g}, they were {there:.0%}",
                    "time runs backwards in sampling: it must begin at the end at which training has noise",
                )
        return None


def share(x: Tensor, noise: Tensor) -> Tensor:
    """Return the coefficient of the noise in each sample (N,), by projection."""
    a, b = to_double(x.detach().flatten(1)), to_double(noise.detach().flatten(1))
    return (a * b).sum(1) / (b * b).sum(1)


def explained(shares: Tensor) -> float:
    """Return the mean absolute share. Of several noise tensors, the largest one was added to the sample."""
    return float(shares.abs().mean())
