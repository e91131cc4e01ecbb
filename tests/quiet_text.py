"""Healthy variants of diffusion/text, among them those that look like bugs."""

from tests.quiet import Healthy

TEXT = "diffusion/text"
SKIPPED = ("terms", "init", "fabricated")
LOOKALIKES = [
    Healthy("text-as-it-is", recipe=TEXT, may_skip=SKIPPED),
    Healthy("text-epsilon", ("--noise.prediction", "epsilon"), recipe=TEXT, may_skip=SKIPPED),
    Healthy("text-longer", ("--new.tokens", "24"), recipe=TEXT, naive="most of a caption is padding", may_skip=SKIPPED),
    Healthy("text-no-average", ("--ema", "0"), recipe=TEXT, naive="raw weights are sampled", may_skip=(*SKIPPED, "average")),
]  # fmt: skip
SAMPLED = ()
