"""The noise process of a rectified flow (Liu 2022): a straight line from picture to noise, and samplers that walk it back."""

from dataclasses import dataclass

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FlowMatchHeunDiscreteScheduler
from torch import Tensor
from trainworthy.core import UserError
from trainworthy.recipes.diffusion.models import noise as curved

COARSEST = 100  # diffusers' schedulers step to 1 / timesteps, then to 0; with one timestep all of their steps are at pure noise


@dataclass
class Noise:
    """The training objective."""

    mean: float = 0.0
    """Noise levels are drawn logit-normal (Esser 2024): the logit of one is normal with this mean; above 0: noisier ones. Large
    pictures need that."""
    std: float = 1.0
    """And with this standard deviation; the smaller, the more of training goes to the middle, where the error is."""
    timesteps: int = 1000
    """What the net is told at pure noise; at a noise level of 0.3 three tenths of it."""
    shift: float = 1.0
    """Above 1 the samplers take more of their steps where it is noisy (Esser 2024); training does so by a mean of log(shift)."""

    def __post_init__(self):
        if min(self.std, self.shift) <= 0 or self.timesteps < COARSEST:
            told = f"--noise.std {self.std:g} --noise.shift {self.shift:g} --noise.timesteps {self.timesteps}"
            raise UserError("noise levels that cannot be drawn, or not walked back", got=told,
                            needed=f"std and shift above 0, {COARSEST} timesteps or more: samplers end with one")  # fmt: skip

    def weights(self, _kind: str, snr: Tensor) -> Tensor:
        """All levels weigh the same: what matters more is drawn more often."""
        return torch.ones_like(snr)

    def below(self, t: Tensor) -> Tensor:
        """Share of training's draws that are at most t: the integral up to s = t / timesteps of the logit-normal density,
        exp(-(logit(s) - mean)^2 / (2 std^2)) / (std sqrt(2 pi) s (1 - s))."""
        return torch.special.ndtr((torch.logit(t / self.timesteps) - self.mean) / self.std)


class Process(curved.Process):
    """x_t = (1 - s) x_0 + s noise, at the noise level s = t / timesteps of (0, 1); t is a real number."""

    def __init__(self, noise: Noise, clean_key: str = "image", bound: float = 1.0):
        self.noise, self.clean_key, self.bound = noise, clean_key, bound
        self.scheduler = FlowMatchEulerDiscreteScheduler(num_train_timesteps=noise.timesteps, shift=noise.shift)

    def levels(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """alpha, sigma (B,)."""
        return 1 - t / self.noise.timesteps, t / self.noise.timesteps

    def add(self, image: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """(B, C, H, W) noised to timestep t (B,). (The scheduler's own scale_noise knows whole timesteps only.)"""
        alpha, sigma = (level.view(-1, 1, 1, 1) for level in self.levels(t))
        return alpha * image + sigma * noise

    def target(self, image: Tensor, noise: Tensor, _t: Tensor) -> Tensor:
        """What the net should say: which way the noise is, the same all along the line."""
        return noise - image

    def weights(self, t: Tensor) -> Tensor:
        """(B,) weight of each sample's mean square error."""
        return torch.ones_like(t)

    def clean(self, prediction: Tensor, noisy: Tensor, t: Tensor) -> Tensor:
        """The picture, within its bounds, that a prediction implies, in one step."""
        return (noisy - self.levels(t)[1].view(-1, 1, 1, 1) * prediction).clamp(-self.bound, self.bound)

    def sampler(self, name: str = "euler"):
        """A scheduler that undoes it: `euler`, or `heun`, which asks the net twice a step. Both end with a step of a thousandth."""
        kind = {"euler": FlowMatchEulerDiscreteScheduler, "heun": FlowMatchHeunDiscreteScheduler}[name]
        return kind.from_config(self.scheduler.config)
