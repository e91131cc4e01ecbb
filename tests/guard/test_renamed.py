"""Classes that are numbered otherwise in the evaluation, found on a model that is right in less than half of its answers."""

from types import SimpleNamespace

import pytest
import torch
from trainworthy.guard.checks.loss import renamed


def observed(right: float, order: list[int], *, trained: float, classes: int = 10, muddled: bool = False, n: int = 800):
    """An evaluation of a model that is `right` in so many answers, whose labels are `order[class]`."""
    draws = torch.Generator().manual_seed(0)
    truth = torch.randint(classes, (n,), generator=draws)
    answer = torch.where(torch.rand(n, generator=draws) < right, truth, torch.randint(classes, (n,), generator=draws))
    if muddled:  # two classes are taken for each other, as early in a training
        answer = torch.where(answer == 3, 5, torch.where(answer == 5, 3, answer))
    labels = torch.tensor(order)[truth]
    one = SimpleNamespace(answers=[(labels, answer)], backwards=0, started=20)
    rows = [{"scored": 64, "right": int(64 * trained), "step": s} for s in range(12, 20)]
    return SimpleNamespace(passes=[one], calls=rows)


SORTED = [3, 0, 7, 1, 9, 2, 8, 4, 6, 5]
SAME = list(range(10))


@pytest.mark.parametrize(
    ("seen", "wrong"),
    [
        (observed(0.33, SORTED, trained=0.4), True),
        (observed(0.6, SORTED, trained=0.6), True),
        (observed(0.4, SAME, trained=0.45), False),
        (observed(0.05, SAME, trained=0.45), False),
        (observed(0.1, SORTED, trained=0.2), False),
        (observed(0.4, SAME, trained=0.45, muddled=True), False),
        (observed(0.3, [1, 2, 0], trained=0.45, classes=3), False),
        (observed(0.3, SORTED, trained=0.9), False),
    ],
)
def test_another_numbering_of_classes(seen, wrong):
    fault = renamed(seen)
    assert (fault is not None) == wrong, fault
