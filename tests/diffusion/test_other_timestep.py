"""A net that is told another timestep than that of its noise, or whose noisy inputs are clamped."""

import pytest
import torch
from trainworthy.recipes.diffusion.gates.walks import clamped, other_timestep
from trainworthy.recipes.diffusion.models import flow_noise, noise


@pytest.mark.parametrize("module", [flow_noise, noise], ids=["flow", "diffusion"])
def test_a_shift_behind_the_noise_is_named(module):
    process = module.Process(module.Noise())
    drawn = torch.linspace(50, 950, 64).round()
    alpha, sigma = process.levels(drawn)
    share = drawn / 1000
    shifted = 1000 * 3 * share / (1 + 2 * share)
    assert other_timestep(process, drawn, alpha, sigma) == ""
    assert "another timestep than that of its noise" in other_timestep(process, shifted, alpha, sigma)
    assert other_timestep(process, drawn, *process.levels(drawn.flip(0))) == ""  # time reversed: a convention


def test_clamped_inputs_are_named():
    noisy = torch.randn(16, 1, 16, 16)
    assert clamped(noisy) == ""
    assert "exactly -1 or 1" in clamped(noisy.clamp(-1, 1))
