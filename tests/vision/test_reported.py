"""Numbers next to the metric: the gates `reported` (vision/classify) and `scored` (vision/segment)."""

import pytest
import torch
from trainworthy.recipes.vision.evaluation import segmentation
from trainworthy.recipes.vision.gates.scored import averaged, definitions

ANSWERS = '            logits.append(model(batch["image"]).float())\n'
GATHERED = "        logits, truth = run.gather(torch.cat(logits)), run.gather(torch.cat(truth))\n"
NEIGHBOUR = ("recall[i].item() for i", "recall[i - 1].item() for i")
PRECISION = ("recall = table.diag() / table.sum(1)", "recall = table.diag() / table.sum(0)")
TWO_VIEWS = (
    ANSWERS,
    ANSWERS.replace('model(batch["image"])', '((model(batch["image"]) + model(batch["image"].roll(1, 3))) / 2)'),
)
BY_PRIOR = (GATHERED, GATHERED + "        logits = logits - torch.linspace(0, 8, n)\n")


@pytest.mark.parametrize("hunk", [NEIGHBOUR, PRECISION], ids=["recall-of-the-neighbour", "precision-as-recall"])
def test_a_number_next_to_the_accuracy_is_another_than_its_name_says(launch, fork, hunk: tuple[str, str]):
    done = launch("check", str(fork(hunk)), "--only", "reported", code=3)
    (verdict,) = done.verdicts()
    assert "by its definition" in verdict["measured"]
    assert ("is a precision: it divides by the predictions" in verdict["cause"]) == (hunk == PRECISION), verdict[
        "cause"
    ]


@pytest.mark.parametrize(
    ("hunk", "why"),
    [(TWO_VIEWS, "other pictures than the samples"), (BY_PRIOR, "another rule than the largest logit")],
    ids=["average-over-two-views", "logits-adjusted-by-prior"],
)
def test_another_way_to_answer_raises_no_alarm(launch, fork, hunk: tuple[str, str], why: str):
    done = launch("check", str(fork(hunk)), "--only", "reported", code=0)
    assert why in done.stdout, done.shown


SCORES = "        return segmentation.scores(confusion_matrix(model, data), classes)\n\n    def confusion_matrix"
AS_PRECISION = SCORES.replace(
    "confusion_matrix(model, data), classes)", "confusion_matrix(model, data), classes) | precision(model, data)"
)
AS_PRECISION = AS_PRECISION.replace(
    "    def confusion_matrix",
    "    def precision(model, data):\n        table = confusion_matrix(model, data)\n"
    '        return {f"recall/{c}": (table[i, i] / table[:, i].sum()).item() for i, c in enumerate(classes)}\n\n    def confusion_matrix',
)


def test_precision_of_masks_that_is_reported_as_recall(launch, fork):
    done = launch("check", str(fork((SCORES, AS_PRECISION), recipe="vision/segment")), "--only", "scored", code=3)
    assert "has recall/background" in done.verdicts()[0]["measured"]


@pytest.mark.parametrize("n", [2, 5])
def test_the_definitions_of_masks_agree_with_the_evaluation(n: int):
    """Also if a class occurs nowhere, or only in the answers."""
    draws = torch.Generator().manual_seed(0)
    mask, answer = (torch.randint(n - 1, (3, 16, 16), generator=draws) for _ in range(2))
    mask[:, :4], answer[0, 8:] = segmentation.IGNORE, n - 1
    classes = [f"class {i}" for i in range(n)]
    assert definitions(mask, answer, classes) == pytest.approx(
        segmentation.scores(segmentation.counted(mask, answer, n), classes)
    )


@pytest.mark.parametrize(
    ("got", "words"), [(0.5, "mean over pictures, with pictures that have no such pixel left out"), (0.625, "counted as 1"),
                       (0.375, "counted as 0"), (0.7, "")]
)  # fmt: skip
def test_a_mean_over_pictures_is_named(got: float, words: str):
    each = [{"iou": 0.4}, {"iou": 0.8}, {"iou": 0.3}, {"miou": 1.0}]
    said = averaged("iou", got, each)
    assert words in said
    assert bool(said) == bool(words)
