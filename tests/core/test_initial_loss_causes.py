"""The likely causes of the initial-loss gate: another loss on purpose comes first where initial weights cannot be the cause."""

import math

import torch
from torch import nn
from trainworthy.core.gates.causes import named
from trainworthy.core.gates.causes.scores import noted_ranges
from trainworthy.core.gates.checks import initial_loss


def test_equal_losses_of_all_samples_exclude_the_initial_weights():
    focal = 0.9**2 * math.log(10)  # gamma 2, ten equally likely classes
    first, *others = named.initial_loss_causes(focal, focal * (1 + 1e-7)).split("\n")
    assert first.startswith("another loss on purpose: set `initial_loss=1.865`")
    assert not any("too large" in line for line in others)


def test_published_losses_of_equal_outputs():
    expected = math.log(10)
    assert named.published_loss(0.9**2 * expected, expected) == "the focal loss of gamma 2"
    assert named.published_loss(expected + 0.9, expected).startswith("poly-1")
    for other in (expected, expected / 2, 0.8 * expected, 6.2):
        assert not named.published_loss(other, expected)


def test_unequal_losses_keep_the_initial_weights_first():
    for half in (5.1, None):
        first, *others = named.initial_loss_causes(6.2, half).split("\n")
        assert "initial weights are too large" in first
        assert "on purpose" in others[-1]


def test_equal_outputs_exclude_the_initial_weights_whatever_the_samples_weigh():
    """Class weights: half of the samples have another loss."""
    net = nn.Linear(4, 10)
    nn.init.zeros_(net.weight)
    nn.init.zeros_(net.bias)
    with noted_ranges(net) as ranges:
        net(torch.randn(8, 4))
    assert ranges == [0.0]
    first, *others = named.initial_loss_causes(2.786, 2.5, equal=True).split("\n")
    assert first.startswith("another loss on purpose: set `initial_loss=2.786`")
    assert "all outputs are equal" in first
    assert not any("too large" in line for line in others)
    net.reset_parameters()
    with noted_ranges(net) as ranges:
        net(torch.randn(8, 4))
    assert ranges[0] > 0.1


def test_terms_that_a_fork_has_added():
    """They are left out if the others have the declared value; a term that must be small is not."""
    terms = {"ce": 6.4, "z": 0.01, "second": 0.64}
    assert (
        initial_loss._without_added(terms, 6.4, ("z",))
        == "the declared terms and of `second` (0.640), which other gates check"
    )
    assert not initial_loss._without_added({"ce": 6.4, "z": 1.5}, 6.4, ("z",))
    assert not initial_loss._without_added({"ce": 9.1, "second": 0.64}, 6.4, ())
    assert not initial_loss._without_added({"ce": 9.1}, 6.4, ())
