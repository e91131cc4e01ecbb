"""A loss that no known mistake fits: which places it weighs otherwise than its formula."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from trainworthy.core.gates.causes import place_weights

CLASSES = 5


def named(change) -> str:
    """What is said of a loss whose pixels' cross-entropies (B, H, W) went through `change` (cross-entropy, mask)."""
    torch.manual_seed(0)
    net = nn.Conv2d(3, CLASSES, 1)
    nn.init.normal_(net.weight, std=1.0)
    image, mask = torch.randn(4, 3, 8, 8), torch.randint(0, CLASSES, (4, 8, 8))

    def plain() -> torch.Tensor:
        return F.cross_entropy(net(image), mask, reduction="none")

    return place_weights.named(net, lambda: change(plain(), mask).sum(), lambda: plain().sum(), 1e-4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda ce, _: ce.clamp_max(1.5), "the loss is clamped: the"),
        (lambda ce, _: (ce - 1.0).clamp_min(0), "below"),
        (lambda ce, mask: ce * (mask > 0), "class 0 gets no gradient at 100%"),
        (lambda ce, mask: ce * torch.tensor([1.0, 2.0, 1.0, 1.0, 0.5])[mask], "class 4 by 0.5, class 1 by 2"),
        (lambda ce, _: ce.flatten(1).sum(1) * torch.tensor([1.0, 2.0, 3.0, 4.0]), "samples are weighted, by 1 to 4"),
        (lambda ce, _: ce.square(), "places weigh more, the higher their loss"),
        (lambda ce, _: 1 - (-ce).exp(), "places weigh less, the higher their loss"),
        (lambda ce, _: (-ce).exp().square() * ce, "places are pushed away from their own class"),
        (lambda ce, _: ce * (torch.arange(8) % 2), "50% of places get no gradient"),
        (lambda ce, _: ce * 3, ""),
        (lambda ce, _: ce, ""),
    ],
)  # fmt: skip
def test_weights_of_places_name_the_change(change, words: str):
    found = named(change)
    assert words in found, found
    assert bool(words) == bool(found), found


def test_another_loss_has_no_weights():
    torch.manual_seed(0)
    net, x, y = nn.Linear(6, CLASSES), torch.randn(32, 6), torch.randint(0, CLASSES, (32,))
    brier = lambda: (net(x).softmax(1) - F.one_hot(y, CLASSES)).square().sum()  # noqa: E731
    assert place_weights.named(net, brier, lambda: F.cross_entropy(net(x), y, reduction="sum"), 1e-4) == ""


def test_a_loss_that_calls_the_model_twice_is_left_alone():
    net, x, y = nn.Linear(6, CLASSES), torch.randn(32, 6), torch.randint(0, CLASSES, (32,))
    one = lambda: F.cross_entropy(net(x), y, reduction="sum")  # noqa: E731
    assert place_weights.named(net, lambda: one() + one(), one, 1e-4) == ""
