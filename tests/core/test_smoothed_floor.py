"""A loss with smoothed labels has a floor that the loss itself gives: `overfit` does not need it declared."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from trainworthy.core.gates.causes.scores import Smoothed, smoothed_floor

from tests.vision.planted_classify import LOSS


def entropy(smoothing: float, n: int) -> float:
    p = torch.full((n,), smoothing / n, dtype=torch.double)
    p[0] += 1 - smoothing
    return torch.special.entr(p).sum().item()


@pytest.mark.parametrize("shape", [(6, 5), (6, 5, 4, 4)], ids=["classes", "pixels"])
@pytest.mark.parametrize("ignored", [255, -100])
def test_the_floor_is_the_entropy_of_the_smoothed_labels(shape: tuple[int, ...], ignored: int):
    scores, target = torch.randn(shape), torch.randint(5, (shape[0], *shape[2:]))
    target[0] = ignored
    other = torch.tensor(3.0)

    def loss() -> Tensor:
        return other + 2 * F.cross_entropy(scores, target, ignore_index=ignored, label_smoothing=0.2)

    with Smoothed() as labels:
        plain = loss()
    assert labels.found
    assert plain == loss()
    assert smoothed_floor(loss) == pytest.approx(2 * entropy(0.2, 5), rel=1e-5)


def test_a_module_counts_and_plain_labels_do_not():
    scores, target = torch.randn(6, 5), torch.randint(5, (6,))
    assert smoothed_floor(lambda: nn.CrossEntropyLoss(label_smoothing=0.1)(scores, target)) == pytest.approx(
        entropy(0.1, 5), rel=1e-5
    )
    with Smoothed() as labels:
        F.cross_entropy(scores, target)
    assert not labels.found


def test_overfit_of_smoothing_that_is_not_declared(launch, fork):
    """The settings say 0.1, the loss smooths by 0.4: at right answers the loss is 1.21."""
    fork((LOSS, LOSS.replace("cfg.label_smoothing", "0.4")))
    launch("check", "mine.py", "--only", "overfit", code=0)


def test_overfit_of_wrong_targets_that_are_smoothed(launch, fork):
    fork((LOSS, LOSS.replace("cfg.label_smoothing", "0.4").replace('batch["label"]', '(batch["label"] + 1) % n')))
    launch("check", "mine.py", "--only", "overfit", code=3)
