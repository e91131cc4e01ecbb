"""Healthy variants of vision/detect that look like bugs."""

from tests.helpers.plant import Healthy
from tests.vision.planted_detect import DATA, DETECT

SKIPS = ("fabricated", "init", "batch-norm")
EMPTY = """data = data._replace(boxes=[b[:0] if i % 3 == 0 else b for i, b in enumerate(data.boxes)],
                         labels=[y[:0] if i % 3 == 0 else y for i, y in enumerate(data.labels)])
    """


def healthy(id: str, *argv: str, hunk=None, naive: str = "", skips: tuple[str, ...] = SKIPS) -> Healthy:
    return Healthy(id, argv, hunk, naive, recipe=DETECT, may_skip=skips)


VARIANTS = [
    healthy("ok-det-retinanet", "--model", "retinanet", skips=(*SKIPS, "initial-loss")),
    healthy("ok-det-faster-rcnn", "--model", "faster-rcnn", naive="two forwards draw other proposals",
            skips=(*SKIPS, "initial-loss", "tiny-data", "formula")),
    healthy("ok-det-mirrored", "--hflip", naive="a box is elsewhere than it is stored"),
    healthy("ok-det-cropped", "--crop", naive="boxes are cut, shrunk or gone"),
    healthy("ok-det-no-augmentation", "--no-augment"),
    healthy("ok-det-enlarged", "--image-size", "128", naive="boxes on the canvas are others than those stored"),
    healthy("ok-det-empty-pictures", hunk=(DATA, EMPTY + DATA), naive="pictures without any object"),
]  # fmt: skip
SAMPLED = ()  # make verify has them all
