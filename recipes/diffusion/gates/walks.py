"""Follows an exported pipeline from noise to an image, with its net replaced by one that knows the image.

This is an end-to-end test of a noise process. It works with any names, signs and direction of time, if recipe and pipeline agree.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from torch import Tensor, nn

Ask = Callable[[DiffusionPipeline, dict, nn.Module, int], Tensor]
"""(pipeline, a batch of one, the net that knows it, number of steps) -> the pipeline's picture (1, C, H, W) in [-1, 1]."""
BENT = 0.05  # of the sum of both shares
CLAMPED = 0.02  # share of entries at a bound; noise alone puts one entry of all there
AWAY = 0.1  # of the schedule, from which a timestep is another one
FAR = 0.05  # of the schedule, from which no trained timestep is near
MANY = 0.2  # share of a sampler's timesteps from which this is the cause
CALM = 0.05  # signal level below which an implied picture only magnifies the prediction's rounding


@dataclass
class Walk:
    """How exactly an exported pipeline follows its net."""

    worst: float = 0.0
    """Largest rms between the clean picture that a step implies and the real one."""
    end: float = 0.0
    """The same after the last step."""
    met: set[float] = field(default_factory=set)
    """Timesteps that the net got."""


def walked(pipe: DiffusionPipeline, nets: list[nn.Module], ones: list[dict], clean: str, ask: Ask, steps: int) -> Walk:
    """Run `pipe` for each of `ones` (batches of one; the clean tensor is in field `clean`) with its net from `nets`."""
    pipe.set_progress_bar_config(disable=True)
    found, scheduler, own = Walk(), pipe.scheduler, pipe.scheduler.step

    def rms(made: Tensor, one: dict) -> float:
        off = (made.float() - one[clean].to(made.device)).square().mean().sqrt().item()
        return off if math.isfinite(off) else math.inf

    for net, one in zip(nets, ones, strict=True):
        last: list[Tensor] = []

        @functools.wraps(own)  # pipelines inspect the signature
        def step(prediction: Tensor, t: Tensor, sample: Tensor, *args, net=net, one=one, last=last, **kwargs):
            output = own(prediction, t, sample, *args, **{**kwargs, "return_dict": True})
            implied = _implied(scheduler, output, sample)
            if implied is not None and net.alpha >= CALM:
                found.worst = max(found.worst, rms(implied, one))
            last[:] = [output.prev_sample]
            return output if kwargs.get("return_dict", True) else (output.prev_sample,)

        scheduler.step = step
        try:
            ask(pipe, one, net, steps)
        finally:
            scheduler.step = own
        found.end = max(found.end, rms(last[0], one) if last else math.inf)
        found.met |= net.met
    return found


def _implied(scheduler, output, sample: Tensor) -> Tensor | None:
    """Return the clean picture that a step implies, or None if the scheduler has none."""
    if getattr(output, "pred_original_sample", None) is not None:
        return output.pred_original_sample
    if not isinstance(scheduler, FlowMatchEulerDiscreteScheduler) or scheduler.step_index is None:
        return None
    level, after = scheduler.sigmas[scheduler.step_index - 1 : scheduler.step_index + 1].tolist()
    return sample + (output.prev_sample - sample) * level / (level - after)


def by_class(pipe: DiffusionPipeline, one: dict, knowing: nn.Module, steps: int = 10) -> Tensor:
    """Call a pipeline whose condition is a class index."""
    pipe.unet.forward = lambda *a, **k: knowing(*a, **k)
    made = pipe(one["label"].tolist(), num_inference_steps=steps, guidance_scale=1.0, output_type="pt")
    return made.images * 2 - 1


def left_over(scheduler) -> float:
    """Return the share of the signal at the noisiest level of an exported scheduler, where sampling assumes none: 0 for a flow; for a
    diffusion, the square root of the last cumulative product of alphas."""
    if hasattr(scheduler, "alphas_cumprod"):
        return float(scheduler.alphas_cumprod[int(max(scheduler.timesteps.tolist()))]) ** 0.5
    return max(0.0, 1.0 - float(scheduler.sigmas.max()))


def other_timestep(process: Any, timestep: Tensor, alpha: Tensor, sigma: Tensor) -> str:
    """Return that the net is told another timestep than that of its noise, if most inputs have the level of one that is far away. `alpha`,
    `sigma`: of the inputs, (B,), as measured."""
    total = process.noise.num_train_timesteps
    grid = torch.arange(1, total)
    of_grid = torch.log(torch.stack(process.levels(grid)).double().clamp_min(1e-9))
    level, known = torch.log((alpha / sigma).double().cpu().clamp(1e-9, 1e9)), of_grid[0] - of_grid[1]
    own = grid[(level[:, None] - known).abs().argmin(1)]
    away = (own - timestep.double().cpu()) / total
    far = away.abs() > AWAY
    if far.double().mean() < 0.5 or (away[far] > 0).double().mean() not in (0.0, 1.0):
        return ""
    i = int(away.abs().argmax())
    return (f"the net gets another timestep than that of its noise: {far.double().mean():.0%} of the inputs are over {AWAY:.0%} of the schedule "
            f"away, e.g. timestep {float(timestep[i]):.0f} with the noise of {int(own[i])}")  # fmt: skip


def bent(kind: str, timestep: Tensor, alpha: Tensor, sigma: Tensor) -> str:
    """Return that pictures are noised along another path than the target's: noise - picture is the direction of a straight line, on which
    alpha + sigma is 1. `alpha`, `sigma`: of the inputs, (B,), as measured."""
    total = (alpha + sigma).double().cpu()
    i = int((total - 1).abs().argmax())
    if kind != "flow" or (total - 1).abs().median() < BENT:
        return ""
    return (f"pictures are noised along another path than the target's: noise - picture leads along a straight line, on which their shares have "
            f"the sum 1; at timestep {float(timestep[i]):.0f} they are {float(alpha[i]):.2f} and {float(sigma[i]):.2f}")  # fmt: skip


def clamped(noisy: Tensor) -> str:
    """Return that the net's inputs (B, C, H, W) are clamped, if many entries are exactly the smallest or the largest of all."""
    low, high = noisy.min(), noisy.max()
    share = ((noisy == low) | (noisy == high)).double().mean().item()
    if share < CLAMPED:
        return ""
    return (f"the noisy inputs are clamped: {share:.0%} of their entries are exactly {low.item():g} or {high.item():g}. Noise has no bounds, and "
            "the sampler's inputs have none")  # fmt: skip


def untrained(trained: Tensor, met: set[float], total: int) -> str:
    """Return that many of the timesteps that a sampler meets are far from all that training draws; `total`: timesteps of the schedule."""
    least, most = trained.min().item(), trained.max().item()
    far = [t for t in met if not least - FAR * total <= t <= most + FAR * total]
    if len(far) < MANY * len(met) or not far:
        return ""
    return (f"{len(far)} of the {len(met)} timesteps at which the sampler asks the net are far from all that training draws: {least:.0f} to "
            f"{most:.0f}, and sampling runs from {max(met):.0f} to {min(met):.0f}")  # fmt: skip
