"""Padding, resampling and lengths that have nothing to do with the class."""

from tests.core.planted_fabricated import UPSAMPLED, cut, made_up
from tests.helpers.plant import Healthy
from tests.vision.planted_classify import STAGES

VARIANTS = [
    Healthy("padded-at-random", hunk=(STAGES, made_up("rows = index * 31 % 6\nimage[:, :rows] = 0", "rows / 28")),
            naive="blank rows"),
    Healthy("upsampled-at-random",
            hunk=(STAGES, made_up(f"coarse = index % 3 == 0\nimage = {UPSAMPLED} if coarse else image", "0.75 * coarse")),
            naive="a third is interpolated"),
    Healthy("one-class-a-little-more-padded",
            hunk=(STAGES, made_up("rows = index * 31 % 6 + (label == 1)\nimage[:, :rows] = 0", "rows / 28")),
            naive="the padding depends on the class"),
    Healthy("lengths-at-random", hunk=(STAGES, cut("22 + index * 31 % 7")), naive="lengths differ"),
    Healthy("ones-a-little-shorter", hunk=(STAGES, cut("22 + index * 31 % 7 - 2 * (label == 1)")),
            naive="the length depends on the class"),
]  # fmt: skip
SAMPLED = ("padded-at-random",)
