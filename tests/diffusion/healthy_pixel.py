"""Healthy variants of diffusion/pixel, among them those that look like bugs."""

from tests.helpers.plant import Healthy

PIXEL = "diffusion/pixel"
VARIANTS = [
    Healthy("epsilon", ("--noise.prediction-type", "epsilon"), recipe=PIXEL),
    Healthy("ok-12-unconditional", ("--conditioning-dropout-prob", "0", "--sampling.guidance-scale", "1"), recipe=PIXEL,
            naive="the condition is never dropped", may_skip=("terms", "init", "fabricated", "hidden-class")),
    Healthy("no-average", ("--ema", "0"), recipe=PIXEL, naive="raw weights are sampled",
            may_skip=("terms", "init", "fabricated", "ema")),
    Healthy("uniform-weights", ("--noise.snr-gamma", "inf"), recipe=PIXEL, naive="no min-SNR weighting"),
    Healthy("linear-schedule", ("--noise.beta-schedule", "linear"), recipe=PIXEL),
    Healthy("ok-26-few-timesteps", ("--noise.num-train-timesteps", "100"), recipe=PIXEL, naive="timesteps are missing"),
]  # fmt: skip
SAMPLED = ()
