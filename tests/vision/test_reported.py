"""The gate `reported` of vision/classify: numbers next to the accuracy, and evaluations that it cannot check."""

import pytest

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
    assert "by its definition" in done.verdicts()[0]["measured"]


@pytest.mark.parametrize(
    ("hunk", "why"),
    [(TWO_VIEWS, "other pictures than the samples"), (BY_PRIOR, "another rule than the largest logit")],
    ids=["average-over-two-views", "logits-adjusted-by-prior"],
)
def test_another_way_to_answer_raises_no_alarm(launch, fork, hunk: tuple[str, str], why: str):
    done = launch("check", str(fork(hunk)), "--only", "reported", code=0)
    assert why in done.stdout, done.shown
