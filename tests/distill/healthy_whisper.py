"""Healthy variants of distill/whisper."""

from tests.distill.planted_whisper import BOTH, FIRST, GOT, RECIPE, SECOND
from tests.helpers.plant import Healthy

SKIPS = ("terms", "init", "fabricated", "initial-loss", "tiny-data")
DROPPED = ("x = x + self.out(seen.transpose(1, 2).flatten(2))",
           "x = x + F.dropout(self.out(seen.transpose(1, 2).flatten(2)), 0.05, self.training)")  # fmt: skip
VARIANTS = [
    Healthy("distil-weights-of-the-terms", (*FIRST, "--mse", "0.5", "--cosine", "2"), recipe=RECIPE, may_skip=SKIPS),
    Healthy("distil-bf16", (*FIRST, "--train.precision", "bf16"), recipe=RECIPE, may_skip=SKIPS),
    Healthy("distil-small-student", (*FIRST, "--width", "64", "--depth", "2"), recipe=RECIPE, may_skip=SKIPS),
    Healthy("distil-letters", (*SECOND, "--decoder", "ctc", "--task.lr", "2e-3"), recipe=RECIPE, may_skip=SKIPS),
    Healthy("distil-dropout", FIRST, DROPPED, recipe=RECIPE, may_skip=SKIPS, naive="two forwards differ"),
    Healthy("distil-speed-of-both", FIRST, (GOT, BOTH), recipe=RECIPE, may_skip=SKIPS, naive="shapes differ in training"),
]  # fmt: skip
SAMPLED: tuple[str, ...] = ()
