"""Healthy runs of what people fine-tune with: pictures mixed in pairs, an average of the weights."""

from tests.helpers.plant import Healthy

VARIANTS = [
    Healthy("mixed-and-averaged", ("--mix.mixup", "0.2", "--mix.cutmix", "1", "--ema", "0.99"),
            naive="the loss stays far above that of the smoothing; the weights that are evaluated are not those that train"),
    Healthy("much-mixed", ("--mix.mixup", "1"), naive="the loss stays far above that of the smoothing"),
]  # fmt: skip
SAMPLED = ()
