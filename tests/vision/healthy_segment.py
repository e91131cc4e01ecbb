"""Healthy variants of vision/segment that look like bugs."""

from tests.helpers.plant import Healthy
from tests.vision.planted_segment import FLIP, SEGMENT

SKIPS = ("fabricated", "init")


def healthy(id: str, *argv: str, hunk=None, naive: str = "", skips: tuple[str, ...] = SKIPS) -> Healthy:
    return Healthy(id, argv, hunk, naive, recipe=SEGMENT, may_skip=skips)


TVERSKY = (
    "return ((1 - 2 * both / (predicted + truth).clamp_min(1)) * (truth > 0)).sum()",
    "wide = both + 0.7 * (truth - both) + 0.3 * (predicted - both)\n        return ((1 - both / wide.clamp_min(1)) * (truth > 0)).sum()",
)
VARIANTS = [
    healthy("ok-seg-no-dice", "--dice", "0", skips=(*SKIPS, "terms")),
    healthy("ok-seg-focal", "--focal", "2", naive="sure pixels have next to no gradient"),
    healthy("ok-seg-tversky", hunk=TVERSKY, naive="the term called dice is not Dice"),
    healthy("ok-seg-no-augmentation", "--no-augment", naive="most of a training window is void"),
    healthy("ok-seg-scaled", "--resize", "300", "--scale", "1.5", naive="windows reach beyond a shrunk picture: padded, void"),
    healthy("ok-seg-digits", "--data.path", "digits", "--data.scenes", "400", "--window", "96", "--fold", "2", "--widths",
            "24", "48", "96", "--optim.lr", "3e-3", naive="a third of every object is void", skips=(*SKIPS, "tiny-data")),
    healthy("ok-seg-batch-norm", "--norm", "batch", naive="samples of a batch mix"),
    healthy("ok-seg-colours", hunk=(FLIP, FLIP[:-1] + ", v2.ColorJitter(0.4, 0.4)]"),
            naive="the picture changes and its mask does not"),
    healthy("ok-seg-quarter-turns", hunk=(FLIP, FLIP[:-1] + ", v2.RandomApply([v2.RandomRotation((90, 90))])]"),
            naive="half of the masks have rows and columns exchanged"),
]  # fmt: skip
SAMPLED = ()  # make verify has them all
