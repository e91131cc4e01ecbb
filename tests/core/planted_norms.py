"""Bugs planted in batch norm: statistics of one or two pictures, running ones that never arrive."""

from tests.helpers.plant import Plant
from tests.vision.healthy_classify import BATCH_NORM
from tests.vision.planted_classify import STAGES, staged

MAKE = ("batch_norm(stage.model)", 'stage.optimizers = {"main": core.make_optimizer(stage.model, cfg.optim)}')
EACH = ("for module in stage.model.modules():", "    if isinstance(module, nn.BatchNorm2d):")


def normalised(*more: str) -> str:
    """Batch norm wherever the net has a GroupNorm, and `more` lines behind it."""
    return BATCH_NORM.lstrip() + staged("\n".join([*MAKE, *more]))


PLANTS = [
    Plant("batch-norm-over-two", "batch-norm", "V7", STAGES, normalised(), ("over 2 samples at a time", "GroupNorm"),
          argv=("--train.accumulate", "32"), harm="statistics of two pictures: training and evaluation see other nets"),
    Plant("batch-norm-over-one", "batch-norm", "V7", STAGES, normalised(), ("over 1 sample at a time", "SyncBatchNorm"),
          argv=("--train.batch-size", "1")),
    Plant("statistics-never-arrive", "batch-norm", "V7", STAGES, normalised(*EACH, "        module.momentum = 1e-4"),
          ("83% of the running statistics", "momentum 0.0001"), harm="judged by the statistics of no picture: chance"),
    Plant("frozen-before-it-learnt", "batch-norm", "V7", STAGES,
          normalised("zoo._replace(stage.model, nn.BatchNorm2d, lambda old: zoo.frozen(old, old.eps))", MAKE[1]),
          ("fixed initial statistics", "frozen before the weights were loaded"), harm="a net without any norm"),
]  # fmt: skip
RELATIVES = ["batch-norm-over-one"]
