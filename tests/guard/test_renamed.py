"""Classes that are numbered otherwise in the evaluation, found on a model that is right in less than half of its answers."""

from types import SimpleNamespace

import pytest
import torch
from trainworthy.guard.checks import ending
from trainworthy.guard.checks.loss import renamed
from trainworthy.guard.observing.to_the_end import Evaluation


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


@pytest.mark.parametrize(
    ("answers", "step", "fault"),
    [
        ("moved", 20, True),
        ("moved", 2, False),  # the other evaluation is good later
        ("one", 20, False),  # all samples get one class, and nearly all are of another one
        ("right", 20, False),
    ],
)
def test_an_evaluation_whose_classes_have_other_numbers(answers: str, step: int, fault: bool):
    """Beside one of other data. The first batches of a sorted test were taken for classes with another number."""
    y = torch.randint(6, (300,), generator=torch.Generator().manual_seed(0))
    one = torch.cat([torch.zeros(290), torch.ones(10)]).long()
    truth, given = {"moved": (y, (y + 1) % 6), "one": (one, torch.full((300,), 2)), "right": (y, y)}[answers]

    def evaluation(source: str, at: int, truth: torch.Tensor, given: torch.Tensor) -> Evaluation:
        right = int((truth == given).sum())
        return Evaluation((source,), 0, ("net",), (), at, right=right, rows=len(truth), answers=[(truth, given)])

    both = [evaluation("test", step, truth, given), evaluation("val", 20, y, y)]
    seen = SimpleNamespace(evaluations=both, steps=23)
    assert bool(ending.renumbered(seen)) == fault  # type: ignore[arg-type]
