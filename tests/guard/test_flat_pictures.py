"""Pictures that a script normalises by numbers of another unit: the model gets all but one constant."""

import pytest
import torch
from trainworthy.guard.measures.data.scales import Measures, flat

CHANGES = {
    "as they are": (lambda x: x, False),
    "standardised": (lambda x: (x - 0.3) / 0.3, False),
    "by bytes' numbers": (lambda x: (x - 76) / 77, True),
    "bytes": (lambda x: 255 * x, False),
    "bright": (lambda x: 0.9 + 0.1 * x, False),
}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("change", CHANGES)
def test_pictures_that_are_all_but_constant(change: str, seed: int):
    measures, (make, fault) = Measures(), CHANGES[change]
    draw = torch.Generator().manual_seed(seed)
    for _ in range(5):
        measures.read(make(torch.rand(16, 1, 8, 8, generator=draw)))
    assert bool(flat(measures)) == fault


def test_rows_of_numbers_may_be_far_from_zero():
    measures = Measures()
    for _ in range(5):
        measures.read(300 + torch.randn(64, 8))
    assert not flat(measures)
