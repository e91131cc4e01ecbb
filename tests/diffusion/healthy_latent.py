"""Healthy variants of diffusion/latent, among them those that look like bugs."""

from tests.diffusion.planted_latent import SCALED
from tests.helpers.plant import Healthy

LATENT = "diffusion/latent"
SKIPPED = ("terms", "init", "fabricated")
UNSCALED = """latents.measured(vae, middles[learn])
    mean, factor, half = vae.config.shift_factor, vae.config.scaling_factor, vae.config.latent_channels
    with torch.no_grad():  # what is taken away and divided by between the nets moves into their last and first layer
        own, back = vae.quant_conv, vae.post_quant_conv
        own.weight[:half] *= factor
        own.bias[:half] = (own.bias[:half] - mean) * factor
        back.bias += (back.weight * mean).sum((1, 2, 3))
        back.weight /= factor
    vae.register_to_config(shift_factor=None, scaling_factor=1.0)
    middles = latents.cached(vae, images)
    z = pipeline.scaled(vae, middles)
"""
VARIANTS = [
    Healthy("latent-factor-without-a-shift", recipe=LATENT, may_skip=SKIPPED, hunk=(SCALED, SCALED
            + "    vae.register_to_config(shift_factor=None)\n    z = pipeline.scaled(vae, middles)\n"),
            naive="the mean is not exactly 0"),
    Healthy("ok-20-latents-of-deviation-one", recipe=LATENT, may_skip=SKIPPED, hunk=(SCALED, UNSCALED),
            naive="the factor is missing"),
    Healthy("latent-epsilon", ("--noise.prediction-type", "epsilon"), recipe=LATENT, may_skip=SKIPPED),
    Healthy("latent-two-channels", ("--vae.channels", "2"), recipe=LATENT, may_skip=SKIPPED),
    Healthy("latent-no-average", ("--ema", "0"), recipe=LATENT, naive="raw weights are sampled", may_skip=(*SKIPPED, "ema")),
    Healthy("latent-unconditional", ("--conditioning-dropout-prob", "0", "--sampling.guidance-scale", "1"), recipe=LATENT,
            naive="the condition is never dropped", may_skip=(*SKIPPED, "hidden-class")),
]  # fmt: skip
SAMPLED = ()
