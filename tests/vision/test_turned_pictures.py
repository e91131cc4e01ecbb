"""Evaluations that change their pictures (test-time augmentation): gates with a net that knows the truth answer for the changed picture."""

import pytest
import torch
from trainworthy.core.base.verdict import Skip
from trainworthy.recipes.vision.gates import answers

SCORED = '            total += segmentation.scored(batch, model(batch["image"]), n)\n'
BOTH = (
    '            both = model(batch["image"]).softmax(1) + model(batch["image"]{asked}){back}.softmax(1)\n'
    "            total += segmentation.scored(batch, both, n)\n"
)
MIRRORED_BOXES = (
    '[{**s, "boxes": batch["image"].shape[-1] * torch.tensor([1.0, 0, 1, 0]) + s["boxes"][:, [2, 1, 0, 3]] * '
    'torch.tensor([-1.0, 1, -1, 1])} for s in model(batch["image"].flip(-1))]'
)


def test_a_turned_picture_is_recognised_and_its_answer_turned():
    draws = torch.Generator().manual_seed(0)
    stored = answers.Stored(list(torch.rand(3, 3, 8, 8, generator=draws)))
    mask = torch.arange(64).view(8, 8)
    for turn in answers.TURNS:
        assert torch.equal(turn.undo(turn.apply(mask)), mask), turn.name
        assert stored.find(turn.apply(stored.pictures[1])) == (1, turn)
        bright = (1.2 * turn.apply(stored.pictures[2]) - 0.1).clamp(0, 1)
        assert stored.find(bright) == (2, turn)
        box = turn.boxes(torch.tensor([[1.0, 2.0, 4.0, 7.0]]), (8, 8))[0].int().tolist()
        inside = torch.zeros(8, 8)
        inside[2:7, 1:4] = 1
        where = turn.apply(inside).nonzero()
        assert box == [where[:, 1].min(), where[:, 0].min(), where[:, 1].max() + 1, where[:, 0].max() + 1], turn.name
    for other in (stored.pictures[0][:, :4], torch.rand(3, 8, 8, generator=draws)):
        with pytest.raises(Skip, match="none of the held-out ones"):
            stored.find(other)


@pytest.mark.parametrize(
    ("asked", "back", "verdict"),
    [(".flip(-1)", ".flip(-1)", "pass"), (".transpose(2, 3)", ".transpose(2, 3)", "pass"), (".flip(-1)", "", "fail"),
     ("[..., :32, :32].repeat(1, 1, 2, 2)", "", "skip")],
)  # fmt: skip
def test_masks_of_mirrored_pictures(asked: str, back: str, verdict: str, launch, fork):
    """A correct average over mirror images raised KeyError, with a message of 60,000 characters."""
    fork((SCORED, BOTH.format(asked=asked, back=back)), recipe="vision/segment")
    done = launch("check", "mine.py", "--only", "scored")
    (scored,) = done.verdicts()
    assert scored["verdict"] == verdict, done.shown
    if verdict == "fail":
        assert scored["cause"] == "evaluate() asks about pictures mirrored, and does not turn these answers back"


@pytest.mark.parametrize(("answer", "verdict"), [(MIRRORED_BOXES, "pass"), ('model(batch["image"].flip(-1))', "fail")])
def test_boxes_of_mirrored_pictures(answer: str, verdict: str, launch, fork):
    fork(('enumerate(model(batch["image"]))', f"enumerate({answer})"), recipe="vision/detect")
    done = launch("check", "mine.py", "--only", "precision")
    assert [v["verdict"] for v in done.verdicts()] == [verdict], done.shown
