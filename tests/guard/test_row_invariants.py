"""Marks that preparing a sample leaves in it: lost in the evaluation they are found; changed on purpose, or in training alone, they are not."""

import numpy as np
import pytest
import torch
from torch import Tensor
from trainworthy.guard.measures.data.row_invariants import Invariants, lost
from trainworthy.guard.measures.losses.supervision import proportional


def seen(*batches: Tensor) -> Invariants:
    one = Invariants()
    for x in batches:
        one.read(x)
    return one


def raw(seed: int = 0, *shape: int) -> Tensor:
    return 3 * torch.rand(*(shape or (128, 20)), generator=torch.Generator().manual_seed(seed)) + 1


def centred(x: Tensor, dim: int = -1) -> Tensor:
    return x - x.mean(dim, keepdim=True)


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


def spread(x: Tensor) -> Tensor:
    x = x - x.amin(-1, keepdim=True)
    return x / x.amax(-1, keepdim=True)


SERIES = (128, 12, 3)


@pytest.mark.parametrize(
    ("trained", "other", "words"),
    [
        (centred(raw()), raw(1), "the mean of its values is 0"),
        (unit(raw()), raw(1), "the norm of its values is 1"),
        (raw().softmax(-1), raw(1), "their sum is 1"),
        (spread(raw()), raw(1), "from 0 to 1"),
        (centred(raw(0, *SERIES), 1), raw(1, *SERIES), "mean of"),
    ],
)
def test_a_lost_mark_is_found(trained: Tensor, other: Tensor, words: str):
    assert words in lost(seen(trained), [seen(other)])


one_hot = torch.eye(20)[torch.arange(128) % 20]


@pytest.mark.parametrize(
    ("trained", "others"),
    [
        (centred(raw()), [centred(raw(1))]),
        (raw(), [centred(raw(1))]),  # augmentation, mixing: in training alone
        (unit(raw()), [unit(raw(1)) + 0.005 * torch.randn(128, 20)]),  # an attack, noise
        (unit(raw()), [unit(raw(1)), raw(2)]),  # one evaluation of several goes another way
        (one_hot, [raw(1).softmax(-1)]),  # classes in training, probabilities in the evaluation
        (unit(raw()), [raw(1)[:40]]),  # too few
        (torch.zeros(128, 20), [raw(1)]),
        (raw(), [3 * raw(1)]),
    ],
)
def test_other_evaluations_are_quiet(trained: Tensor, others: list[Tensor]):
    assert lost(seen(trained), [seen(x) for x in others]) == ""


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_weights_that_are_powers_of_the_counts(power: float):
    counts = np.array([40, 500, 90, 2000])
    assert proportional(counts**power, counts, within=0.35)
    assert not proportional(counts**-power, counts, within=0.35)
    assert not proportional([1, 1, 1, 1.5], counts, within=0.35)
