"""The noise process of a rectified flow (Liu 2022): a straight line from picture to noise, and samplers that integrate it backwards."""

from dataclasses import dataclass

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FlowMatchHeunDiscreteScheduler
from torch import Tensor
from trainworthy.core import UserError
from trainworthy.recipes.diffusion.models import noise as curved

COARSEST = 100  # diffusers' schedulers end with the levels 1 / timesteps and 0; with one timestep all their steps are at pure noise


@dataclass
class Noise:
    """The training objective."""

    logit_mean: float = 0.0
    """Mean of the logit of noise levels in training (Esser 2024). Above 0: noisier levels, which large pictures need."""
    logit_std: float = 1.0
    """Standard deviation of that logit. Smaller values train more on middle levels, where the error is."""
    num_train_timesteps: int = 1000
    """Timestep at pure noise; it is proportional to the noise level."""
    shift: float = 1.0
    """Above 1 samplers take more of their steps at noisy levels (Esser 2024); in training use a mean of log(shift) for that."""

    def __post_init__(self):
        if min(self.logit_std, self.shift) <= 0 or self.num_train_timesteps < COARSEST:
            settings = f"--noise.logit-std {self.logit_std:g} --noise.shift {self.shift:g} --noise.num-train-timesteps {self.num_train_timesteps}"
            raise UserError("noise levels that cannot be drawn, or not walked back", got=settings,
                            needed=f"std and shift above 0, {COARSEST} timesteps or more: samplers end with one")  # fmt: skip

    def weights(self, _kind: str, snr: Tensor) -> Tensor:
        """Return weight 1 for all levels: important levels are drawn more often instead."""
        return torch.ones_like(snr)

    def below(self, t: Tensor) -> Tensor:
        """Return the share of training timesteps that are at most t: the integral up to s = t / timesteps of the logit-normal density,
        exp(-(logit(s) - mean)^2 / (2 std^2)) / (std sqrt(2 pi) s (1 - s))."""
        return torch.special.ndtr((torch.logit(t / self.num_train_timesteps) - self.logit_mean) / self.logit_std)


class Process(curved.Process):
    """x_t = (1 - s) x_0 + s noise, at noise level s = t / timesteps in (0, 1); t is a real number."""

    def __init__(self, noise: Noise, clean_key: str = "image", bound: float = 1.0):
        self.noise, self.clean_key, self.bound = noise, clean_key, bound
        self.scheduler = FlowMatchEulerDiscreteScheduler(
            num_train_timesteps=noise.num_train_timesteps, shift=noise.shift
        )

    def levels(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return alpha and sigma, (B,) each."""
        return 1 - t / self.noise.num_train_timesteps, t / self.noise.num_train_timesteps

    def add(self, image: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """Return pictures (B, C, H, W) with noise of timestep t (B,). The scheduler's scale_noise accepts whole timesteps only."""
        alpha, sigma = (level.view(-1, 1, 1, 1) for level in self.levels(t))
        return alpha * image + sigma * noise

    def target(self, image: Tensor, noise: Tensor, _t: Tensor) -> Tensor:
        """Return the training target, noise - picture: it is the same at every level."""
        return noise - image

    def weights(self, t: Tensor) -> Tensor:
        """Return the weight of each sample's mean square error, (B,)."""
        return torch.ones_like(t)

    def clean(self, prediction: Tensor, noisy: Tensor, t: Tensor) -> Tensor:
        """Return the picture that a prediction implies in one step, clamped to its range."""
        return (noisy - self.levels(t)[1].view(-1, 1, 1, 1) * prediction).clamp(-self.bound, self.bound)

    def sampler(self, name: str = "euler"):
        """Return the sampler: `euler`, or `heun` with two net calls per step. The last step of both starts at a level of 0.001."""
        kind = {"euler": FlowMatchEulerDiscreteScheduler, "heun": FlowMatchHeunDiscreteScheduler}[name]
        return kind.from_config(self.scheduler.config)
