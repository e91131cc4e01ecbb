"""Batch norm that is few, slow or strange, and fine."""

from tests.core.planted_norms import EACH, MAKE, normalised
from tests.helpers.plant import Healthy
from tests.vision.planted_classify import STAGES

FROZEN = (*EACH, "        module.requires_grad_(False)",
          "        module.register_forward_pre_hook(lambda m, _: m.eval() and None)", MAKE[1],
          "stage.expect.frozen = tuple(n for n, m in stage.model.named_modules() if isinstance(m, nn.BatchNorm2d))")  # fmt: skip
VARIANTS = [
    Healthy("batch-norm-by-setting", ("--norm", "batch"), naive="samples of a batch mix"),
    Healthy("batch-norm-over-eight", ("--train.accumulate", "8"), hunk=(STAGES, normalised()), naive="small micro-batches"),
    Healthy("batch-norm-frozen-over-two", ("--train.accumulate", "32"), hunk=(STAGES, normalised(*FROZEN)),
            naive="batch norm over two pictures"),
    Healthy("batch-norm-slow", hunk=(STAGES, normalised(*EACH, "        module.momentum = 0.01")), naive="running statistics lag"),
    Healthy("batch-norm-plain-mean", hunk=(STAGES, normalised(*EACH, "        module.momentum = None")), naive="no momentum"),
]  # fmt: skip
SAMPLED = ()  # make verify has them all
