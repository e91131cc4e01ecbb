"""Bugs around classes of unequal size, planted in a fork of vision/classify."""

from tests.helpers.plant import Plant
from tests.vision.planted_classify import STAGES, staged

UNEVEN = ("--balance.ratio", "20")
BY_WEIGHT, BY_SAMPLER = (*UNEVEN, "--balance.by", "weights"), (*UNEVEN, "--balance.by", "sampler")
PARTS = "balanced = balancing.build(cfg.balance, labels[learn], n, eps, mixed=cfg.mix.on)\n"

PLANTS = [
    Plant("weights-of-the-other-split", "balance", "V6", PARTS, PARTS.replace("labels[learn]", "labels[held_out]"),
          ("of another split", "20 to 400"), argv=BY_WEIGHT, harm="held-out classes are of one size: nothing is weighed"),
    Plant("weights-in-another-order", "balance", "V6", PARTS, PARTS.replace("labels[learn]", "n - 1 - labels[learn]"),
          ("another class order",), argv=BY_WEIGHT, harm="the largest class weighs most"),
    Plant("weighed-and-not-divided", "balance", "V6", STAGES, staged('stage.counts = lambda batch: {"*": len(batch["label"])}'),
          ("denominator",), argv=BY_WEIGHT, before=("initial-loss",), why="a mean of weighed losses over unweighed samples",
          harm="a batch without small classes learns at a lower rate"),
    Plant("weighed-and-repeated", "balance", "V6", PARTS,
          PARTS + "    balanced = balancing.build(balancing.Balance(by='weights'), labels[learn], n, eps, mixed=cfg.mix.on)\n",
          ("sampler and weights are both on",), argv=BY_SAMPLER, harm="small classes count twenty times twice"),
]  # fmt: skip
RELATIVES = [p.id for p in PLANTS[1:]]
