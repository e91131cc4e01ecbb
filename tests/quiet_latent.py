"""Healthy variants of diffusion/latent, among them those that look like bugs."""

from tests.plants_latent import SCALED
from tests.quiet import Healthy

LATENT = "diffusion/latent"
SKIPPED = ("terms", "init", "fabricated")
LOOKALIKES = [
    Healthy("latent-factor-without-a-shift", recipe=LATENT, may_skip=SKIPPED, hunk=(SCALED, SCALED
            + "    vae.register_to_config(shift_factor=None)\n    z = pipeline.scaled(vae, middles)\n"),
            naive="the mean is not exactly 0"),
    Healthy("latent-epsilon", ("--noise.prediction", "epsilon"), recipe=LATENT, may_skip=SKIPPED),
    Healthy("latent-two-channels", ("--vae.channels", "2"), recipe=LATENT, may_skip=SKIPPED),
    Healthy("latent-no-average", ("--ema", "0"), recipe=LATENT, naive="raw weights are sampled", may_skip=(*SKIPPED, "average")),
    Healthy("latent-unconditional", ("--drop", "0", "--sampling.guidance-scale", "1"), recipe=LATENT,
            naive="the condition is never dropped", may_skip=(*SKIPPED, "hidden-class")),
]  # fmt: skip
SAMPLED = ()
