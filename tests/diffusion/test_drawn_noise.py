"""The noise that training adds must be that with which sampling begins."""

from types import SimpleNamespace

import pytest
import torch
from trainworthy.recipes.diffusion.gates import drawn_noise

DRAWS = torch.Generator().manual_seed(0)


def aim(noise: torch.Tensor, sigma: float | None = None) -> SimpleNamespace:
    """What `objective` measures of inputs that hold this noise, at many levels."""
    clean = torch.rand(noise.shape, generator=DRAWS) * 2 - 1
    level = torch.linspace(0, 1, len(noise)) if sigma is None else torch.full((len(noise),), sigma)
    alpha, wide = (1 - level).view(-1, 1, 1, 1), level.view(-1, 1, 1, 1)
    return SimpleNamespace(noisy=alpha * clean + wide * noise, clean=clean, alpha=1 - level, sigma=level)


def normal() -> torch.Tensor:
    return torch.randn(256, 1, 28, 28, generator=DRAWS)


@pytest.mark.parametrize(
    ("noise", "words"),
    [
        (torch.rand(256, 1, 28, 28, generator=DRAWS), "mean 0.50, deviation 0.29"),
        (2 * normal(), "deviation 2.0"),
        ((torch.rand(256, 1, 28, 28, generator=DRAWS) - 0.5) * 12**0.5, "excess kurtosis -1.2"),
    ],
    ids=["uniform", "twice", "uniform-of-variance-1"],
)
def test_noise_that_is_not_normal_is_named(noise: torch.Tensor, words: str) -> None:
    assert words in drawn_noise.odd(aim(noise))


def test_normal_noise_with_an_offset_and_too_little_of_it_are_quiet() -> None:
    assert drawn_noise.odd(aim(normal())) == ""
    assert drawn_noise.odd(aim(normal() + 0.1 * torch.randn(256, 1, 1, 1, generator=DRAWS))) == ""
    assert drawn_noise.odd(aim(torch.rand(256, 1, 28, 28), sigma=0.2)) == ""
