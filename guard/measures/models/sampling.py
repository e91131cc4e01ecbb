"""Compares how samples are drawn from a diffusion model with how it is trained.

Sampling starts from pure noise. If the net gets a time there at which its training inputs held hardly any noise, the sampling loop runs
backwards in time. A net that predicts the noise has a negative weight in the next, less noisy sample, one that predicts the sample a positive
one: if training's target is the other one of the two, the sampler takes the output for what it is not.
"""

import weakref
from collections import Counter, deque
from typing import Any

import torch
from torch import Tensor, nn
from trainworthy.core.base.correlation import pearson, spearman
from trainworthy.core.base.doubles import to_double
from trainworthy.guard.hooks.addresses import address_of
from trainworthy.guard.hooks.trees import tensors

CALLS = 64  # training calls that are read
ENTRIES = 32  # least size of a sample
NEAR = 0.1  # fraction of the training calls: those whose times are closest to the first time of sampling
LITTLE, MUCH = 0.35, 0.65  # share of noise in an input, from 0 to 1
ORDERED = 0.8  # rank correlation of time and noise
FEWEST = 256
STEPS, CLEAR = 96, 3.0  # steps of sampling that are read; standard errors from which a weight has a sign
SIGNED, MOSTLY = 6, 0.9  # fewest steps with a sign, and the share of them that must agree
SAMPLE, NOISE = "the sample", "the noise that was added"
FORWARDS, BACKWARDS = "the velocity from noise to sample", "the velocity from sample to noise"
"""Of a straight path (flow matching)."""
BEYOND = 0.5  # share of the sampling loop's times that lie outside of training's, by more than its range
LARGEST = 200_000  # numbers of a batch of samples that are compared


class Sampling:
    """Records time and share of noise of each training input, and the time that the net gets with pure noise."""

    def __init__(self) -> None:
        self.draws: deque = deque(maxlen=8)
        self.calls = 0
        self.noised: dict[int, list[tuple[Tensor, Tensor]]] = {}  # model -> times, shares of noise
        self.starts: dict[int, list[float]] = {}  # model -> times that it got with pure noise
        self.given: Tensor | None = None  # the last input of training that holds noise,
        self.added: list[Tensor] = []  # and noise of its shape
        self.targets: Counter = Counter()
        self.last: tuple[int, Tensor] | None = None  # model and input of the last call of a sampling loop
        self.signs: Counter = Counter()  # of the output's weight in the next input
        self.paired: Counter = Counter()  # the same of two outputs that make a step: with a condition and without
        self.shape: tuple[int, ...] = ()  # of the sampling loop's sample, of which `last` and `outputs` hold some rows
        self.outputs: list[Tensor] = []  # of the calls on the sampling loop's present sample
        self.guided = False  # two outputs make a step
        self.asked: dict[int, list[float]] = {}  # model -> times that it got in sampling loops

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
        self._follow(id(module), x.detach())
        times = [v for v in given if v is not x and v.numel() in (1, len(x)) and v.dim() < 3 and not v.requires_grad]
        if len(times) > 1 and len(real := [v for v in times if v.is_floating_point()]) == 1:
            times = real  # the others are class numbers
        noise = [n for ref in self.draws if (n := ref()) is not None and n.shape == x.shape]
        if torch.is_grad_enabled() and times and noise and sum(self.targets.values()) < CALLS:
            self.given, self.added = x.detach(), noise
        if len(times) != 1 or (not noise and self.last is None):
            return
        time = to_double(times[0].detach().flatten()).expand(len(x))
        if self.last is not None and len(self.asked.setdefault(id(module), [])) < FEWEST:
            self.asked[id(module)].append(float(time[0]))
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

    def compared(self, one: Tensor, other: Tensor) -> None:
        """Note what a loss of training compares the output with: the sample, or the noise that was added to it."""
        target = one if other.requires_grad else other
        x, self.given = self.given, None
        if x is None or target.requires_grad or target.shape != x.shape or sum(self.targets.values()) >= CALLS:
            return
        if any(address_of(n) == address_of(target) for n in self.added):
            self.targets[NOISE] += 1
        elif way := next((w for n in self.added if (w := straight(x, target, n))), ""):
            self.targets[way] += 1
        elif any(is_clean(x, target, n) for n in self.added):
            self.targets[SAMPLE] += 1
        else:
            self.targets["another"] += 1

    def _follow(self, model: int, x: Tensor) -> None:
        """Note the weight of the last output in this input, if both belong to one sampling loop."""
        last, self.last = self.last, None
        if torch.is_grad_enabled() or x[0].numel() > LARGEST or sum(self.signs.values()) >= STEPS:
            return
        begins = any((n := ref()) is not None and address_of(n) == address_of(x) for ref in self.draws)
        goes_on = last is not None and last[0] == model and self.shape == x.shape
        if not begins and not goes_on:
            return
        self.shape, half = x.shape, len(x) // 2
        self.guided |= half > 0 and torch.equal(x[:half], x[half : 2 * half])
        x = x[: LARGEST // x[0].numel()]
        again = goes_on and torch.equal(last[1], x)  # type: ignore[index]
        if goes_on and not begins and self.outputs:
            if len(self.outputs) == 2 and not again:
                self.paired[weight_of_both(self.outputs, last[1], x)] += 1  # type: ignore[index]
            if sign := weight_of(self.outputs[-1], last[1], x):  # type: ignore[index]
                self.signs[sign] += 1
        self.outputs = self.outputs if again else []
        self.guided |= again
        self.last = (model, x.clone())

    def gave(self, module: nn.Module, out: Any) -> None:
        """Note the output of a call of a sampling loop."""
        y = next((v for v in tensors(out) if self.last and v.shape == self.shape), None)
        if y is not None and self.last is not None and self.last[0] == id(module):
            self.outputs.append(y.detach()[: len(self.last[1])].clone())

    def _other_kind(self) -> tuple[str, str] | None:
        """Return that the sampling loop takes the output for noise, and training compares it with samples, or the reverse."""
        kind, count = (self.targets.most_common(1) or [("", 0)])[0]
        signs = self.paired if kind in (FORWARDS, BACKWARDS) and self.guided else self.signs
        (sign, most) = (signs.most_common(1) or [(0, 0)])[0]
        due = {SAMPLE: 1, NOISE: -1, FORWARDS: 1, BACKWARDS: -1}.get(kind)
        if due in (None, sign) or not sign or (self.guided and signs is self.signs):
            return None
        if count < 8 or count < 0.95 * sum(self.targets.values()):
            return None
        if most < SIGNED or most < MOSTLY * sum(signs.values()):
            return None
        other = {SAMPLE: NOISE, NOISE: SAMPLE, FORWARDS: BACKWARDS, BACKWARDS: FORWARDS}[kind]
        how = "subtracts it from" if sign < 0 else "adds it to"
        return (
            f"training compares the net's output with {kind}; the sampling loop {how} its sample at {most} of {sum(signs.values())} steps, as if "
            f"it were {other}",
            f"loss and sampler disagree on what the net predicts: the loss must compare with {other}, or the sampler be that of {kind}",
        )

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
                    f"sampling begins with noise alone and gives the net time {start[0]:.3g}, where training's inputs were {here:.0%} noise; far "
                    f"from it, at {float(time[far].mean()):.3g}, they were {there:.0%}",
                    "time runs backwards in sampling: it must begin at the end at which training has noise",
                )
        return self._other_kind() or self._other_times(alike)

    def _other_times(self, alike: dict[int, int]) -> tuple[str, str] | None:
        """Return that the sampling loop tells the net times of another scale than training."""
        for module, asked in self.asked.items():
            rows = self.noised.get(alike.get(module, module), [])
            if sum(len(t) for t, _ in rows) < FEWEST or len(set(asked)) < SIGNED:
                continue
            time = torch.cat([t for t, _ in rows])
            least, most = float(time.min()), float(time.max())
            beyond = [t for t in asked if not least - (most - least) <= t <= most + (most - least)]
            if len(beyond) > BEYOND * len(asked):
                return (
                    f"training gives the net times from {least:.3g} to {most:.3g}, the sampling loop from {min(asked):.3g} to {max(asked):.3g}",
                    "sampling must give the net the time in training's units, not the step number",
                )
        return None


def straight(x: Tensor, target: Tensor, noise: Tensor) -> str:
    """Return which way along a straight path from noise to sample a target is: x = noise + share * target, with the shares' sign."""
    way, y = to_double(x.flatten(1)) - to_double(noise.flatten(1)), to_double(target.flatten(1))
    shares = share(way, y)
    left = (way - shares[:, None] * y).norm(dim=1) / way.norm(dim=1).clamp_min(1e-12)
    if len(x) < 4 or float(left.median()) > 1e-3 or float(shares.std()) < 0.02 or abs(pearson(target, noise)) < 0.1:
        return ""
    return FORWARDS if bool((shares > 0).all()) else BACKWARDS if bool((shares < 0).all()) else ""


def weight_of_both(outputs: list[Tensor], before: Tensor, after: Tensor) -> int:
    """Return the sign of the sum of two outputs' weights in the step from `before` to `after`; 0 if they do not make it."""
    columns = torch.stack([to_double(y.flatten()) for y in outputs], 1)
    step = to_double((after - before).flatten())
    weights = torch.linalg.lstsq(columns, step[:, None], driver="gelsd").solution[:, 0]
    if float((columns @ weights - step).norm()) > 0.1 * float(step.norm()):
        return 0
    return 1 if float(weights.sum()) > 0 else -1


def is_clean(x: Tensor, target: Tensor, noise: Tensor) -> bool:
    """Return whether each input is a sum of its target and of noise whose share differs from sample to sample. In a straight path (flow
    matching) that share is 1 for the difference of sample and noise."""
    found = coefficients(x, target, noise)
    return found is not None and len(x) > 3 and bool((found[0] > -1e-3).all()) and float(found[1].std()) > 0.02


def coefficients(noisy: Tensor, clean: Tensor, noise: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the coefficients of noisy = a * clean + b * noise + c for each sample; None if that does not fit."""
    x = to_double(clean.flatten(1))
    columns = torch.stack([x, to_double(noise.flatten(1)), torch.ones_like(x)], 2)
    goal = to_double(noisy.flatten(1))[:, :, None]
    try:
        found = torch.linalg.lstsq(columns, goal).solution
    except RuntimeError:
        return None
    left = (columns @ found - goal).flatten(1).norm(dim=1) / goal.flatten(1).norm(dim=1).clamp_min(1e-12)
    if float(left.median()) > 1e-3 or abs(pearson(x, noise)) > 0.1:
        return None
    return found[:, 0, 0], found[:, 1, 0]


def weight_of(out: Tensor, before: Tensor, after: Tensor) -> int:
    """Return the sign of the weight of `out` in `after`, beside that of `before`: 1 or -1; 0 if noise hides it."""
    x, y, z = (to_double(v.flatten()) for v in (before, out, after))
    x, y, z = (v - v.mean() for v in (x, y, z))
    own = y - (x @ y) / (x @ x).clamp_min(1e-12) * x  # what the input does not explain
    left = z - (x @ z) / (x @ x).clamp_min(1e-12) * x
    if float(own.norm()) < 1e-3 * float(y.norm()):
        return 0
    weight = (own @ left) / (own @ own)
    error = ((left - weight * own).square().mean() / (own @ own)).sqrt()
    return 0 if abs(float(weight)) < CLEAR * float(error) + 1e-6 else (1 if weight > 0 else -1)


def share(x: Tensor, noise: Tensor) -> Tensor:
    """Return the coefficient of the noise in each sample (N,), by projection."""
    a, b = to_double(x.detach().flatten(1)), to_double(noise.detach().flatten(1))
    return (a * b).sum(1) / (b * b).sum(1)


def explained(shares: Tensor) -> float:
    """Return the mean absolute share. Of several noise tensors, the largest one was added to the sample."""
    return float(shares.abs().mean())
