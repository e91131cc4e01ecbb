"""Healthy variants of vision/classify that look like bugs in rates, clipping or loss terms."""

from tests.core.planted_rates import MATH, rate, scaled, two_terms
from tests.helpers.plant import Healthy
from tests.vision.planted_classify import CLIP, LOOP, STAGES, UPDATE

VARIANTS = [
    Healthy("wsd", ("--optim.schedule", "wsd"), naive="the rate does not fall"),
    Healthy("linear", ("--optim.schedule", "linear")),
    Healthy("adamw-high", ("--optim.lr", "0.01"), naive="rate too high: it trains as well"),
    Healthy("adamw-low", ("--optim.lr", "1e-3"), naive="rate too low: it trains as well"),
    Healthy("sgd-high", ("--optim.name", "sgd", "--optim.lr", "0.2")),
    Healthy("large-batch", ("--train.batch-size", "256")),
    Healthy("one-epoch", ("--train.epochs", "1"), naive="few steps at the peak"),
    Healthy("small-auxiliary-term", hunk=(STAGES, two_terms("0.01")), naive="a term without weight"),
    Healthy("two-equal-terms", hunk=(STAGES, two_terms("1.0"))),
    Healthy("declared-small-term", hunk=(STAGES, two_terms("1e-5", 'stage.expect.small_terms = ("match",)')),
            naive="a term that does nothing"),
    Healthy("declared-schedule",
            hunk=(LOOP, "    stage.expect.schedule = 'constant by hand'\n" + rate("1.0")), naive="not the schedule's rates"),
    Healthy("own-cosine-to-a-tenth", hunk=(LOOP, rate("0.55 + 0.45 * math.cos(math.pi * step.index / total)", MATH)),
            naive="not the schedule's rates"),
    Healthy("scheduler-beside-core's",
            hunk=(LOOP, '    idle = torch.optim.lr_scheduler.ConstantLR(stage.optimizers["main"], factor=1.0)\n'
                  "    for step in run.steps(stage):\n" + UPDATE + "        idle.step()\n"), naive="a second scheduler ticks"),
    Healthy("scaled-and-clipped", hunk=(LOOP, scaled("scaler.unscale_(optimizer)", CLIP))),
    Healthy("scaled-in-the-optimiser", ("--optim.clip", "inf"), hunk=(LOOP, scaled()),
            naive="gradients 65,536 times too long: a fused optimiser divides them itself"),
]  # fmt: skip
SAMPLED = ()  # make verify has them all
