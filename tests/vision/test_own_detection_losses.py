"""`formula` of vision/detect on terms of no published form that it knows: what draws locations to their objects is quiet, what does not is
stopped."""

import pytest

from tests.helpers.sampling import sample
from tests.rl.test_rl_objectives import failed
from tests.vision.planted_detect import FEW

IMPORT = "import torch\n"
HEADER = "import torch\nfrom torchvision import ops\nfrom torchvision.models.detection import fcos as its\n\n"
CIOU = HEADER + "its.generalized_box_iou_loss = ops.complete_box_iou_loss\n"
SOFT = """
def soft(logits, truth, reduction="sum"):
    p, target = logits.sigmoid(), 0.9 * truth + 0.001
    return (-(target * logits.sigmoid().log() + (1 - target) * (-logits).sigmoid().log()) * (target - p).abs() ** 2).sum()

its.sigmoid_focal_loss = soft
"""
HEALTHY = {"ciou": CIOU, "quality-focal": HEADER + SOFT}
BUGS = {
    "boxes-pushed-away": (
        HEADER + "its.generalized_box_iou_loss = lambda a, b, reduction: (1 + ops.distance_box_iou_loss(a, b)).reciprocal().sum()\n",
        "not pulled to their objects",
    ),
    "background-drawn-up": (
        HEADER + "its.sigmoid_focal_loss = lambda x, y, reduction: (x.sigmoid() - 0.5 * y - 0.5).square().sum()\n",
        "are pushed up",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sample(HEALTHY, "ciou"))
def test_a_term_that_draws_locations_to_their_objects_is_quiet(name: str, launch, fork):
    fork((IMPORT, HEALTHY[name]), recipe="vision/detect")
    done = launch("check", "mine.py", *FEW, "--only", "formula", code=0)
    assert "of the recipe's own" in done.verdicts()[0]["measured"], done.shown


@pytest.mark.parametrize("name", sample(BUGS, "boxes-pushed-away"))
def test_a_term_that_does_not_is_stopped(name: str, launch, fork):
    hunk, words = BUGS[name]
    fork((IMPORT, hunk), recipe="vision/detect")
    done = launch("check", "mine.py", *FEW, "--only", "formula", code=3)
    assert words in failed(done)["formula"]["measured"], done.shown
