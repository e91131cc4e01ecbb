"""Pictures of two splits on two scales, and pictures that are only darker or flatter."""

import pytest
import torch
from trainworthy.core.data.field_statistics import Stats, rescaled
from trainworthy.core.gates.causes import named
from trainworthy.core.recipe.stage import Field

MEAN, STD = torch.tensor([0.485, 0.456, 0.406])[:, None, None], torch.tensor([0.229, 0.224, 0.225])[:, None, None]
CHANGES = {
    "the same": (lambda x: x, lambda x: x, False),
    "both normalised": (lambda x: (x - MEAN) / STD, lambda x: (x - MEAN) / STD, False),
    "only training": (lambda x: (x - MEAN) / STD, lambda x: x, True),
    "only validation": (lambda x: x, lambda x: (x - MEAN) / STD, True),
    "to -1 and 1 in one": (lambda x: 2 * x - 1, lambda x: x, True),
    "digits": (lambda x: (x - 0.3) / 0.37, lambda x: x, True),
    "darker": (lambda x: x, lambda x: (x - 0.2).clamp(0, 1), False),
    "a darker camera": (lambda x: x, lambda x: 0.5 * x, True),
    "flatter": (lambda x: x, lambda x: x.mean() + (x - x.mean()) * x.mean(), False),
    "brighter by a power": (lambda x: x, lambda x: x**0.4, False),
}


def scanned(change, seed: int) -> dict:
    stats, draw = Stats(), torch.Generator().manual_seed(seed)
    for _ in range(100):
        light = 0.6 * torch.rand(3, 1, 1, generator=draw)
        stats.add(change((light + 0.4 * torch.randn(3, 16, 16, generator=draw)).clamp(0, 1)))
    return stats.report()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", CHANGES)
def test_pictures_of_the_splits_on_one_scale(name: str, seed: int):
    train, val, fault = CHANGES[name]
    assert rescaled(scanned(train, seed), scanned(val, 100 + seed)) == fault


def test_the_side_that_is_normalised_is_named():
    normalised, plain = scanned(CHANGES["only training"][0], 0), scanned(CHANGES["the same"][0], 1)
    field = Field("input")
    assert named.explain_split_scales(normalised, plain, field).startswith("training inputs are normalised")
    assert named.explain_split_scales(plain, normalised, field).startswith("validation inputs are normalised")


def test_a_series_that_grows_is_not_compared():
    train, val = Stats(), Stats()
    for i in range(50):
        x = torch.sin(torch.arange(24.0) + i)
        train.add(x)
        val.add(2 * x)
    assert not rescaled(train.report(), val.report())
