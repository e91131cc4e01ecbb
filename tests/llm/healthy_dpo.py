"""Healthy variants of llm/dpo that look like bugs."""

from tests.helpers.plant import Healthy

DPO = "llm/dpo"
SKIPS = ("terms", "fabricated", "baseline", "range-test", "tiny-data")

VARIANTS = [
    Healthy("ok-19-dpo-as-it-is", recipe=DPO, may_skip=SKIPS,
            naive="every margin is zero at first: no output depends on its input"),
    Healthy("ok-21-dpo-ipo", ("--loss", "ipo", "--beta", "0.5"), recipe=DPO, may_skip=SKIPS,
            naive="a mean over tokens; the first loss is not ln 2"),
    Healthy("dpo-hinge", ("--loss", "hinge"), recipe=DPO, may_skip=SKIPS, naive="the first loss is not ln 2"),
    Healthy("dpo-nca", ("--loss", "nca_pair", "--beta", "0.5"), recipe=DPO, may_skip=SKIPS, naive="the loss stays near 0.95"),
    Healthy("dpo-exo", ("--loss", "exo_pair", "--beta", "0.5"), recipe=DPO, may_skip=SKIPS, naive="the first loss is not ln 2"),
    Healthy("dpo-apo", ("--loss", "apo_zero", "--beta", "0.5"), recipe=DPO, may_skip=SKIPS, naive="the first loss is not ln 2"),
    Healthy("dpo-beta", ("--beta", "0.3"), recipe=DPO, may_skip=SKIPS, naive="margins are small"),
    Healthy("dpo-no-lora", ("--lora-rank", "0", "--optim.lr", "2e-5"), recipe=DPO, may_skip=SKIPS,
            naive="the model is its own reference"),
    Healthy("dpo-micro-batches", ("--train.accumulate", "2"), recipe=DPO, may_skip=SKIPS, naive="a mean of means"),
    Healthy("dpo-mixture", recipe=DPO, may_skip=SKIPS, naive="the loss is none of the formulas",
            hunk=("        loss_type=cfg.loss,\n", '        loss_type=["sigmoid", "bco_pair"],\n        loss_weights=[0.8, 0.2],\n')),
]  # fmt: skip
SAMPLED = ()  # make verify has them all
