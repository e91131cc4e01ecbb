"""Healthy variants of llm/reward that look like bugs."""

from tests.helpers.plant import Healthy
from tests.llm.planted_reward import COLLATOR

REWARD = "llm/reward"
SKIPS = ("terms", "fabricated", "baseline", "range-test", "tiny-data")
LEFT = """        def left(rows, collate=trainer.data_collator):
            batch = collate(rows)
            n = batch["attention_mask"].sum(1)
            turn = lambda x: torch.stack([r.roll(x.shape[1] - int(k)) for r, k in zip(x, n, strict=True)])
            return {k: turn(v) for k, v in batch.items()}

        split.collator = left
"""

VARIANTS = [
    Healthy("ok-18-reward-padded-left", hunk=(COLLATOR, LEFT), recipe=REWARD, may_skip=SKIPS,
            naive="the last token stands elsewhere, and positions are not given"),
    Healthy("reward-centered", ("--center-rewards-coefficient", "0.05"), recipe=REWARD, may_skip=SKIPS, naive="the loss is not Bradley and Terry's"),
    Healthy("reward-no-lora", ("--lora-rank", "0", "--optim.lr", "2e-5"), recipe=REWARD, may_skip=SKIPS, naive="nothing is frozen"),
    Healthy("reward-adapters-alone", ("--no-merge-adapters",), recipe=REWARD, may_skip=SKIPS, naive="the export has no configuration"),
    Healthy("reward-micro-batches", ("--train.accumulate", "2"), recipe=REWARD, may_skip=SKIPS, naive="a mean of means"),
]  # fmt: skip
SAMPLED = ()  # make verify has them all
