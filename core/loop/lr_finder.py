"""Learning-rate range test of Smith 2015 (arXiv 1506.01186) that may also find no usable rate.
It can be used outside a recipe:

    finder = LRFinder(model, optimizer, torch.nn.functional.cross_entropy, "cpu")
    finder.range_test(loader)
    finder.plot("range.png")
    rate = finder.suggested_lr()  # a float, or None: no usable rate
"""

import contextlib
import copy
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from trainworthy.core.base import seeds
from trainworthy.core.base.errors import UserError
from trainworthy.core.data.loader import to_device

CLEAR = 8.0  # standard deviations of the smoothed loss; pure noise falls this far in one or two of 1,000 tests
BLOW_UP = 3.0  # a rise above the best loss by 3 times its value, to 4 x best, ends the test (fast.ai's rule)


@dataclass
class Band:
    """Learning rates between which a range test observed a falling loss."""

    low: float
    """Rate at which the loss had first fallen clearly."""
    high: float
    """First rate after `low` at which the loss was back at its start or not finite; else the last rate tried."""
    blew_up: bool
    """Whether the loss was back at its start or not finite."""
    spent: float
    """Sum of the rates of all steps up to `low`: the distance that the first clear fall took."""


class LRFinder:
    """Trains with an increasing learning rate, records the loss, and restores everything.

    A batch that is a tuple or list of two is (inputs, targets), and its loss is `loss_fn(model(inputs), targets)`. For
    any other batch (a dict, for example) the loss is `loss_fn(model, batch)`. The loss is a scalar; lower is better.

    The optimizer's groups keep their ratios: the tested rate is that of the group with the highest one.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, loss_fn: Callable[..., Tensor], device: torch.device | str
    ):
        self.model, self.optimizer, self.loss_fn, self.device = model, optimizer, loss_fn, torch.device(device)
        self.rates: list[float] = []
        """Rate of every step taken."""
        self.losses: list[float] = []
        """Loss of its batch, before that step."""
        self.smoothed: list[float] = []
        """Bias-corrected exponential mean of the losses."""
        self.verdict = ""
        """Why there is a suggestion, or none."""
        self._window = 1
        self._steps = 0
        self._ended = ""

    def range_test(
        self, loader: Iterable, lr_start: float = 1e-7, lr_end: float = 1e-1, num_steps: int = 200
    ) -> "LRFinder":
        """Take `num_steps` optimiser steps at rates from `lr_start` to `lr_end`, evenly spaced in log(rate); return
        self.

        Batches are repeated if the loader is shorter. The test ends early when the smoothed loss exceeds 4 x its best
        or is not finite. Afterwards weights, buffers, gradients, optimizer state, rates, modes and random generators
        are as before.
        """
        if not 0 < lr_start < lr_end < math.inf:
            raise UserError("the range test needs a range of rates", got=f"lr_start={lr_start:g}, lr_end={lr_end:g}",
                            needed="0 < lr_start < lr_end")  # fmt: skip
        if num_steps < 10:
            needed = "10 or more; 200 is usual"
            raise UserError("the range test is too short", got=f"num_steps={num_steps}", needed=needed)
        self.rates, self.losses, self.smoothed, self._ended = [], [], [], ""
        self._steps, self._window = num_steps, max(2, num_steps // 20)
        with restored(self.model, self.optimizer):
            if not self.model.training:
                self.model.train()  # only then, since a model in train mode may hold frozen parts in eval mode
            self._sweep(_cycle(loader, num_steps), np.geomspace(lr_start, lr_end, num_steps).tolist())
        self._steepest()
        return self

    def suggested_lr(self) -> float | None:
        """Return a third of the rate at which the loss falls fastest, or None if it never falls clearly."""
        steepest = self._steepest()
        return None if steepest is None else self.rates[steepest] / 3

    def band(self) -> Band | None:
        """Return the usable rates, or None if the loss never falls clearly.

        Clearly means by `CLEAR` standard deviations and by 5% of the largest such fall. Neither depends on the loss's
        scale.
        """
        found = self._fall()
        if found is None:
            return None
        low, back = found
        ended = len(self.rates) < self._steps
        high = self.rates[min(back, len(self.rates) - 1)]
        return Band(self.rates[low], high, back < len(self.rates) or ended, sum(self.rates[: low + 1]))

    def plot(self, path: str | Path, *, configured: float | None = None) -> Path:
        """Plot losses over rates (the ending of `path` sets the format), with the band and the suggestion, or the
        reason for none. Also marks the `configured` rate, if given."""
        from matplotlib.figure import Figure

        steepest = self._steepest()
        figure = Figure(figsize=(7, 4.2), layout="constrained")
        axes = figure.add_subplot()
        axes.plot(self.rates, self.losses, color="tab:blue", alpha=0.25, linewidth=1, label="loss of each batch")
        axes.plot(self.rates, self.smoothed, color="tab:blue", linewidth=2, label="smoothed")
        band = self.band()
        if steepest is not None and band is not None:
            rate, suggested = self.rates[steepest], self.rates[steepest] / 3
            axes.plot([rate], [self.smoothed[steepest]], "o", color="tab:orange", label=f"steepest descent, {rate:.2g}")
            axes.axvline(suggested, color="tab:green", linestyle="--", label=f"suggestion, {suggested:.2g}")
            usable = f"falls, {band.low:.2g} to {band.high:.2g}"
            axes.axvspan(band.low, band.high, color="tab:green", alpha=0.08, label=usable)
        else:
            axes.text(0.5, 0.5, f"no usable rate\n{self.verdict}", transform=axes.transAxes, ha="center", va="center",
                      color="tab:red", fontsize=12, wrap=True)  # fmt: skip
        if configured is not None:
            axes.axvline(configured, color="black", linestyle=":", label=f"configured, {configured:.2g}")
        if self.rates:
            axes.set_xscale("log")
        title = "Learning-rate range test" + (f" ({self._ended})" if self._ended else "")
        axes.set(xlabel="learning rate", ylabel="loss")
        axes.set_title(title, fontsize=10)
        if steepest is not None:  # a diverged loss would flatten the rest of the curve
            low, start = min(self.losses), max(self.losses[: steepest + 1])
            axes.set_ylim(low - 0.1 * (start - low), start + 0.5 * (start - low))
        axes.legend(loc="lower left", fontsize=9)
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
        return path

    # ------------------------------------------------------------------------------------------------------- the test
    def _sweep(self, batches: Iterator, rates: list[float]) -> None:
        """Take one optimiser step per rate, until the loss diverges."""
        ratios = _ratios(self.optimizer)
        beta, mean, best = 1 - 1 / self._window, 0.0, math.inf
        for i, rate in enumerate(rates):
            for group, ratio in zip(self.optimizer.param_groups, ratios, strict=True):
                _set_rate(group, rate * ratio)
            loss = self._loss(to_device(next(batches), self.device))
            value = loss.item()
            if not math.isfinite(value):
                self._ended = f"ended at {rate:.2g}: the loss is {value}"
                return
            mean = beta * mean + (1 - beta) * value
            smoothed = mean / (1 - beta ** (i + 1))
            self.rates.append(rate)
            self.losses.append(value)
            self.smoothed.append(smoothed)
            best = min(best, smoothed)
            if smoothed - best > BLOW_UP * abs(best):
                self._ended = f"ended at {rate:.2g}: the loss is {smoothed:.3g}, its best was {best:.3g}"
                return
            for parameter in _parameters(self.model, self.optimizer):
                parameter.grad = None
            loss.backward()
            self.optimizer.step()

    def _loss(self, batch: Any) -> Tensor:
        if isinstance(batch, (tuple, list)) and len(batch) == 2:
            loss = self.loss_fn(self.model(batch[0]), batch[1])
        else:
            loss = self.loss_fn(self.model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise UserError("loss_fn must return one number per batch", got=got, needed="a scalar tensor",
                            cause='reduction="none", or a dict of terms: sum them')  # fmt: skip
        return loss

    # ---------------------------------------------------------------------------------------------------- its result
    def _fall(self) -> tuple[int, int] | None:
        """Return (index of the first clear fall, first index after it where the loss is back at its start), or None;
        sets `verdict`.

        At some step the loss must be clearly below its start, by `CLEAR` standard deviations of the smoothed loss.
        These are estimated from differences of neighbouring losses up to that step, which exclude the trend and a later
        divergence: sd(smoothed) = sd(difference) / sqrt(2) * sqrt((1 - beta) / (1 + beta)).
        """
        if not self._steps:
            raise UserError("no range test was run", needed="range_test(loader) first")
        start = self._window
        if len(self.smoothed) <= start + 2 * self._span:
            self.verdict = f"only {len(self.smoothed)} steps before the loss blew up"
            return None
        smoothed, noise = np.array(self.smoothed), self._noise()
        fall = smoothed[start] - smoothed
        needed = np.maximum(CLEAR * noise, 1e-3 * abs(smoothed[start]))
        clear = [i for i in range(start, len(fall)) if fall[i] > needed[i]]
        if not clear:
            lowest = start + int(fall[start:].argmax())
            self.verdict = f"the loss falls by {fall[lowest]:.2g}; {needed[lowest]:.2g} would be clear of its noise"
            return None
        best = clear[int(fall[clear].argmax())]
        self.verdict = f"the loss falls by {fall[best]:.2g}, {fall[best] / max(noise[best], 1e-12):.0f} times its noise"
        low = next(i for i in clear if fall[i] >= 0.05 * fall[best])
        return low, next((i for i in range(low, len(fall)) if fall[i] <= 0), len(fall))

    def _steepest(self) -> int | None:
        """Return the index of the steepest descent of the smoothed loss over log(rate), before it is first back at its
        start."""
        found = self._fall()
        if found is None:
            return None
        start, span, smoothed = self._window, self._span, np.array(self.smoothed)
        slope = np.full(len(smoothed), math.inf)  # rates are evenly spaced in log, so differences are slopes
        slope[span:-span] = smoothed[2 * span :] - smoothed[: -2 * span]
        lowest = start + int(smoothed[start : found[1]].argmin())
        return start + int(slope[start : lowest + 1].argmin())

    @property
    def _span(self) -> int:
        """Steps on either side that a slope uses."""
        return max(1, self._window // 2)

    def _noise(self) -> np.ndarray:
        """Standard deviation of the smoothed loss at each step, from differences of neighbouring losses up to it."""
        squares = np.diff(self.losses) ** 2
        seen = np.maximum(np.arange(len(self.losses)), min(2 * self._window, len(squares)))  # too few give no estimate
        return np.sqrt(np.cumsum(squares)[seen - 1] / seen / 2 / (2 * self._window - 1))


@contextlib.contextmanager
def restored(model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    """Restore everything that training inside changes, bit by bit: weights, buffers, gradients, modes, optimizer,
    random state."""
    parameters = _parameters(model, optimizer)
    tensors = [*parameters, *model.buffers()]  # includes buffers that state_dict() leaves out
    values = [t.detach().clone() for t in tensors]
    gradients = [p.grad for p in parameters]  # the same tensor objects; training inside makes new ones
    modes = [(m, m.training) for m in model.modules()]
    groups = [{k: copy.deepcopy(v) for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    state = {p: copy.deepcopy(s) for p, s in optimizer.state.items()}
    try:
        with seeds.kept_draws(), torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for module, training in modes:
            module.training = training
        for group, saved in zip(optimizer.param_groups, groups, strict=True):
            parameters_of_group = group["params"]
            group.clear()
            group.update(saved, params=parameters_of_group)
        optimizer.state.clear()
        optimizer.state.update(state)


def _parameters(model: nn.Module, optimizer: Optimizer) -> list[nn.Parameter]:
    """Parameters of the model, and those in the optimizer alone (a loss with its own weights), each once."""
    both = [*model.parameters(), *(p for g in optimizer.param_groups for p in g["params"])]
    return list({id(p): p for p in both}.values())


def _ratios(optimizer: Optimizer) -> list[float]:
    """Each group's rate over the highest one, using the peak rates if a schedule has stored them."""
    peaks = [float(g.get("peak_lr", g.get("initial_lr", g["lr"]))) for g in optimizer.param_groups]
    if max(peaks) <= 0:
        raise UserError("every group of the optimizer has rate 0", needed="rates whose ratios the test can keep, e.g. lr=1e-3",
                        cause="a warm-up schedule was attached before the range test")  # fmt: skip
    return [p / max(peaks) for p in peaks]


def _set_rate(group: dict, rate: float) -> None:
    if isinstance(group["lr"], Tensor):  # capturable optimizers keep the rate on the device
        group["lr"] = torch.full_like(group["lr"], rate)
    else:
        group["lr"] = rate


def _cycle(loader: Iterable, steps: int) -> Iterator:
    """Repeat the batches without end. Raises if the loader gives none, or too few and only once."""
    done = 0
    while True:
        before = done
        for batch in loader:
            done += 1
            yield batch
        if done == before:
            raise UserError("the loader gives no batch" + (" a second time" if done else ""), got=f"{done} batches",
                            needed=f"at least one, or {steps} from an iterator that cannot start again",
                            cause="an empty data set, or drop_last with fewer samples than a batch")  # fmt: skip
