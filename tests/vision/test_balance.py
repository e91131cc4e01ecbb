"""Classes of unequal size in vision/classify: what stays, what is repeated, what the losses are."""

import math

import pytest
import torch
from torch.nn import functional as F
from trainworthy.core.base.errors import UserError
from trainworthy.recipes.vision.classify import Images
from trainworthy.recipes.vision.data import balancing
from trainworthy.recipes.vision.data.pictures import Labelled
from trainworthy.recipes.vision.gates import pictures

LABELS = torch.arange(10).repeat_interleave(100)


class Given(torch.nn.Module):
    """Logits as they are."""

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        return logits


@pytest.fixture
def batch() -> dict:
    torch.manual_seed(0)
    return {"image": torch.randn(6, 3), "label": torch.tensor([0, 0, 1, 2, 2, 2])}


def test_sizes_fall_exponentially_to_the_ratio():
    every = Labelled(torch.zeros(1000), LABELS, tuple("0123456789"), torch.arange(1000), torch.arange(0))
    sizes = torch.bincount(LABELS[balancing.thinned(every, 50).learn]).tolist()
    assert sizes[0] == 100
    assert sizes[-1] == 2
    assert sizes == [round(100 * 50 ** (-c / 9)) for c in range(10)]
    assert balancing.thinned(every, 1) is every
    with pytest.raises(UserError, match="ratio"):
        balancing.thinned(every, 0.5)


def test_small_classes_come_again_with_draws_of_their_own():
    labels = torch.tensor([0, 0, 0, 0, 1])
    drawn = Images(torch.zeros(5, 1, 2, 2), labels, ("a", "b"), lambda image: image + torch.rand(()))
    even = balancing.Even(drawn, labels)
    assert [int(even.peek(i, "label")) for i in range(len(even))] == [0, 1] * 4
    assert {even.places[i] for i in range(len(even))} == {*range(5)}


def test_weights_are_one_over_the_size_and_the_mean_is_over_weights(batch: dict):
    found = balancing.build(balancing.Balance(by="weights"), batch["label"], 3, 0.1, mixed=False)
    loss = found.loss(Given(), batch)["ce"] / found.counts(batch)["ce"]
    weight = torch.tensor([6 / (3 * 2), 6 / (3 * 1), 6 / (3 * 3)])
    each = F.cross_entropy(batch["image"], batch["label"], label_smoothing=0.1, reduction="none")
    due = (weight[batch["label"]] * each).sum() / weight[batch["label"]].sum()
    assert loss.item() == pytest.approx(due.item(), rel=1e-6)
    assert found.counts(batch)["ce"].item() == pytest.approx(6)  # mean 1
    plain = F.cross_entropy(batch["image"], batch["label"], weight=weight)  # torch's own, without smoothing
    loss = (
        balancing.build(balancing.Balance(by="weights"), batch["label"], 3, 0.0, mixed=False).loss(Given(), batch)["ce"]
        / 6
    )
    assert loss.item() == pytest.approx(plain.item(), rel=1e-6)


def test_focal_loss_is_its_formula_and_cross_entropy_at_gamma_0(batch: dict):
    p = batch["image"].softmax(1).gather(1, batch["label"][:, None])[:, 0]
    for gamma in (0.0, 2.0):
        found = balancing.build(balancing.Balance(by="focal", gamma=gamma), batch["label"], 3, 0.1, mixed=False)
        due = (-((1 - p) ** gamma) * p.log()).sum()
        assert found.loss(Given(), batch)["ce"].item() == pytest.approx(due.item(), rel=1e-6)
    unknowing = found.loss(Given(), {**batch, "image": torch.zeros(6, 3)})["ce"] / 6
    assert unknowing.item() == pytest.approx((2 / 3) ** 2 * math.log(3), rel=1e-6)


def test_balance_and_mixing_are_refused_together(launch):
    done = launch("check", "vision/classify", "--balance.by", "weights", "--mix.mixup", "0.2")
    assert done.returncode == 2, done.shown
    assert "do not go together" in done.stderr


@pytest.mark.parametrize(
    ("often", "weights", "cause"),
    [
        ([400, 400, 400], [0.1, 0.5, 2.4], "sampler and weights are both on"),
        ([400, 60, 20], [1.0, 1.0, 1.0], "of another split"),
        (
            [400, 60, 20],
            [400.0, 60.0, 20.0],
            "the weights are inverted: they grow with the number of samples of a class",
        ),
        ([400, 60, 20], [1 / 60, 1 / 20, 1 / 400], "the weights are in another class order than the labels"),
        ([400, 60, 20], [1.0, 0.8, 0.9], ""),
    ],
)
def test_unequal_classes_have_a_measured_cause(often: list[int], weights: list[float], cause: str):
    """`weights of another split, in another class order, or inverted` was printed for a sampler and weights that are both on."""
    found = pictures._unbalanced(often, weights)
    assert (cause in found) if cause else not found, found


@pytest.mark.parametrize(("labels", "uneven"), [([0, 1, 2, 0, 1], False), ([0, 0, 0, 1, 3], True)])
def test_training_is_uneven(labels: list[int], uneven: bool):
    assert balancing.build(balancing.Balance(), torch.tensor(labels), 4, 0.0, mixed=False).uneven == uneven
