"""The distribution of the noise that training adds. Sampling begins with normal noise of variance 1."""

from torch import Tensor
from trainworthy.core.base.doubles import to_double
from trainworthy.recipes.diffusion.gates.objective import Objective

NOISY = 0.3  # least share of noise in an input from which it is computed
ENTRIES = 10_000  # fewer say little about a distribution
OFF = 0.05  # mean and relative standard deviation; an offset of 0.1 for each picture (Guttenberg 2023) adds 0.005
TAILS = 0.5  # excess kurtosis; of a uniform distribution -1.2
CAUSE = "the noise of training is not normal with variance 1 (torch.rand for torch.randn, or a factor), and sampling begins with noise that is"


def of_training(aim: Objective) -> Tensor | None:
    """Return the noise (N, C, H, W) in the net's inputs, or None if there is too little of it."""
    some = aim.sigma.abs() > NOISY
    alpha, sigma = (level[some].view(-1, 1, 1, 1) for level in (aim.alpha, aim.sigma))
    noise = to_double((aim.noisy[some] - alpha * aim.clean[some]) / sigma)
    return noise if noise.numel() >= ENTRIES else None


def odd(aim: Objective) -> str:
    """Return what is not normal about it; "" if nothing is."""
    if (noise := of_training(aim)) is None:
        return ""
    mean, deviation = noise.mean(), noise.std()
    tails = ((noise - mean) / deviation).pow(4).mean().item() - 3
    if abs(mean) <= OFF and abs(deviation - 1) <= OFF and abs(tails) <= TAILS:
        return ""
    return f"the noise that training adds has mean {mean:.2f}, deviation {deviation:.2f}, excess kurtosis {tails:.1f} (normal noise: 0, 1, 0)"
