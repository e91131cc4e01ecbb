"""Healthy variants of rl/rlhf that look like bugs."""

from tests.helpers.plant import Healthy

SKIPS = ("data", "leakage", "fabricated", "initial-loss", "overfit", "baseline", "loader", "range-test", "tiny-data")


def healthy(id: str, *argv: str, naive: str = "", skips: tuple[str, ...] = (), hunk=None) -> Healthy:
    return Healthy(id, argv, hunk, naive, recipe="rl/rlhf", may_skip=(*SKIPS, *skips))


VARIANTS = [
    healthy(
        "rlhf-counts-a-word",
        "--reward",
        "the",
        naive="longer texts earn more",
    ),
    healthy("rlhf-no-price", "--init-kl-coef", "0", naive="the distance is paid for by nobody", skips=("controller",)),
    healthy("rlhf-one-pass", "--update-epochs", "1", naive="the ratio is 1 everywhere"),
    healthy("rlhf-one-big-minibatch", "--train.batch-size", "64"),
    healthy("rlhf-micro-batches", "--train.accumulate", "3", naive="micro-batches have different numbers of tokens"),
    healthy("rlhf-no-value-clip", "--clip-range-vf", "inf"),
    healthy("rlhf-discount", "--gamma", "0.99", "--gae-lambda", "1"),
    healthy("rlhf-one-length", "--data.tokens", "8", naive="most prompts are left out"),
    healthy("rlhf-cool", "--temperature", "0.7", naive="what is scored is not what the model says"),
    healthy("rlhf-bf16", "--train.precision", "bf16", naive="losses differ between cuts"),
]
SAMPLED = ()  # make verify has them all
