"""Healthy variants of rl/sac, among them those that look like bugs."""

from tests.helpers.plant import Healthy
from tests.rl import healthy_ppo


def healthy(id: str, *argv: str, naive: str = "") -> Healthy:
    return Healthy(id, argv, naive=naive, recipe="rl/sac", may_skip=healthy_ppo.SKIPS)


VARIANTS = [
    healthy("ok-sac-hot", "--init-temperature", "1", naive="entropy is all that counts at first"),
    healthy("ok-sac-cold", "--init-temperature", "0.02", naive="a term without a gradient"),
    healthy("ok-sac-narrow", "--target-entropy", "-2", naive="a policy that is nearly sure of itself"),
    healthy("ok-sac-slow-target", "--tau", "0.001", naive="the target hardly moves in a whole rehearsal"),
    healthy("ok-sac-clipped", "--optim.clip", "1"),
    healthy("ok-sac-ring-comes-round", "--buffer-size", "1024", naive="what was seen is overwritten"),
    healthy("ok-sac-few-updates", "--gradient-steps", "8"),
    healthy("ok-sac-accumulate", "--train.accumulate", "3"),
    healthy("ok-sac-stacked", "--frame-stack", "3"),
    healthy("ok-sac-sparse-reward", "--env", "MountainCarContinuous-v0", naive="no reward in most episodes: not learning"),
]  # fmt: skip
SAMPLED = ()  # make verify has them all; as it is, every recipe is checked by tests/core/test_recipes.py
