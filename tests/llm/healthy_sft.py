"""Healthy variants of llm/sft that look like bugs."""

from tests.helpers.plant import Healthy

SKIPS = ("terms", "fabricated", "initial-loss", "range-test", "tiny-data")

VARIANTS = [
    Healthy("ok-02-lora-of-rank-one", ("--lora-rank", "1"), recipe="llm/sft", may_skip=SKIPS, naive="A has no gradient in step 1"),
    Healthy("ok-02-no-lora", ("--lora-rank", "0", "--optim.lr", "1e-4"), recipe="llm/sft", may_skip=SKIPS,
            naive="the rate is a tenth of what adapters need"),
    Healthy("ok-04-bf16-base", ("--train.precision", "bf16"), recipe="llm/sft", may_skip=SKIPS, naive="losses differ between cuts"),
    Healthy("ok-09-the-template-s-own-system-turn", ("--data.system", ""), recipe="llm/sft", may_skip=SKIPS,
            naive="the prompt begins with text that is not in the data"),
    Healthy("four-micro-batches", ("--train.accumulate", "4"), recipe="llm/sft", may_skip=SKIPS, naive="a mean of means"),
]  # fmt: skip
