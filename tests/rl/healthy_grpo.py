"""Healthy variants of rl/grpo that look like bugs."""

from tests.helpers.plant import Healthy

GRPO = "rl/grpo"
SKIPS = (
    "data",
    "leakage",
    "fabricated",
    "initial-loss",
    "terms",
    "overfit",
    "baseline",
    "loader",
    "range-test",
    "tiny-data",
)

VARIANTS = [
    Healthy("ok-17-grpo-as-it-is", recipe=GRPO, may_skip=SKIPS, naive="the loss stays at zero, and gradients do not"),
    Healthy("grpo-two-passes", ("--num-iterations", "2"), recipe=GRPO, may_skip=SKIPS, naive="two optimiser steps to a unit"),
    Healthy("grpo-kl", ("--beta", "0.05"), recipe=GRPO, may_skip=SKIPS, naive="the reference is the policy's own weights"),
    Healthy("grpo-micro-batches", ("--train.accumulate", "2"), recipe=GRPO, may_skip=SKIPS, naive="a mean of means"),
    Healthy("ok-16-grpo-small-groups", ("--num-generations", "4"), recipe=GRPO, may_skip=SKIPS, naive="many groups do not differ"),
    Healthy("grpo-no-lora", ("--lora-rank", "0", "--optim.lr", "2e-6"), recipe=GRPO, may_skip=SKIPS, naive="no adapter trains"),
]  # fmt: skip
SAMPLED = ()  # make verify has them all
