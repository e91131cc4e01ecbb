"""Healthy variants of llm/pretrain that look like bugs."""

from tests.helpers.plant import Healthy

SKIPS = ("fabricated", "init", "tiny-data")


def healthy(id: str, *argv: str, naive: str = "", skips: tuple[str, ...] = ()) -> Healthy:
    return Healthy(id, argv, None, naive, recipe="llm/pretrain", may_skip=(*SKIPS, *skips))


VARIANTS = [
    healthy("ok-08-pretrain-bf16", "--train.precision", "bf16", naive="losses differ between cuts"),
    healthy("pretrain-four-micro-batches", "--train.accumulate", "4", naive="rows have different numbers of tokens"),
    healthy("pretrain-no-z-loss", "--z-loss", "0", skips=("z-loss", "terms")),
    healthy("pretrain-much-z-loss", "--z-loss", "0.01", naive="the loss is no cross-entropy"),
    healthy("pretrain-wsd", "--optim.schedule", "wsd"),
    healthy(
        "ok-10-pretrain-short-rows",
        "--data.context",
        "64",
        "--data.stride",
        "63",
        naive="position 0 many times in a row",
    ),
    healthy("pretrain-stride-of-one-quarter", "--data.stride", "32", naive="a token is read four times"),
]
SAMPLED = ()  # make verify has them all
