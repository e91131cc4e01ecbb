"""Healthy variants of diffusion/flow, among them those that look like bugs."""

from tests.diffusion.planted_flow import DRAWN
from tests.helpers.plant import Healthy

FLOW = "diffusion/flow"
UNIFORM = (DRAWN, DRAWN.replace("torch.sigmoid(logit)", "torch.rand((), generator=generator)"))
VARIANTS = [
    Healthy("flow-noisier-levels", ("--noise.logit-mean", "1"), recipe=FLOW, naive="a quarter of the schedule is hardly drawn"),
    Healthy("flow-narrow-levels", ("--noise.logit-std", "0.5"), recipe=FLOW, naive="the ends of the line are hardly drawn"),
    Healthy("flow-uniform-levels", hunk=UNIFORM, recipe=FLOW,
            naive="the middle, where the error is, is learnt less: 95.0% for 95.5%, bench/harm.py"),
    Healthy("flow-shifted", ("--noise.shift", "3"), recipe=FLOW, naive="steps of the sampler are not those of training"),
    Healthy("flow-few-timesteps", ("--noise.num-train-timesteps", "100"), recipe=FLOW, naive="the net is told 0 to 100"),
    Healthy("flow-half-the-steps", ("--sampling.num-inference-steps", "12"), recipe=FLOW, naive="too few steps"),
    Healthy("flow-unconditional", ("--conditioning-dropout-prob", "0", "--sampling.guidance-scale", "1"), recipe=FLOW,
            naive="the condition is never dropped", may_skip=("terms", "init", "fabricated", "hidden-class")),
    Healthy("flow-no-average", ("--ema", "0"), recipe=FLOW, naive="raw weights are sampled",
            may_skip=("terms", "init", "fabricated", "ema")),
    Healthy("flow-huber", hunk=(
        "        error = (prediction - target).square().mean((1, 2, 3))  # (B,)\n",
        '        error = 2.64 * nn.functional.smooth_l1_loss(prediction, target, reduction="none").mean((1, 2, 3))  # as large at first\n',
    ), recipe=FLOW, naive="the gradient of the loss is not on a line"),
    Healthy("flow-direction-too", hunk=(
        '        return {"mse": error.sum()}\n',
        "        apart = 1 - torch.nn.functional.cosine_similarity(prediction.flatten(1), target.flatten(1))  # (B,)\n"
        '        return {"mse": error.sum(), "direction": 0.1 * apart.sum()}\n',
    ), recipe=FLOW, naive="the gradient of the loss is zero at another prediction"),
]  # fmt: skip
SAMPLED = ()
