"""Healthy variants of rl/dqn, among them those that look like bugs."""

from tests.helpers.plant import Healthy
from tests.rl import healthy_ppo
from tests.rl.planted_dqn import FOLLOW


def healthy(id: str, *argv: str, naive: str = "", hunk=None) -> Healthy:
    return Healthy(id, argv, hunk, naive, recipe="rl/dqn", may_skip=(*healthy_ppo.SKIPS, "terms"))


VARIANTS = [
    healthy("ok-dqn-plain", "--no-double", "--no-dueling", naive="the largest of the target network's own values"),
    healthy("ok-dqn-three-steps", "--n-step", "3", naive="returns of what other policies did"),
    healthy("ok-dqn-prioritised", "--prioritized-replay-alpha", "0.6", naive="samples are drawn again and again"),
    healthy("ok-dqn-rainbow-like", "--prioritized-replay-alpha", "0.6", "--n-step", "3", "--gamma", "0.997"),
    healthy("ok-dqn-ring-comes-round", "--buffer-size", "1024", naive="what was seen is overwritten"),
    healthy("ok-dqn-constant-exploration", "--exploration-fraction", "0", "--exploration-final-eps", "0.1", naive="no schedule"),
    healthy("ok-dqn-slow-target", "--target-update-interval", "1000", naive="the target network is not updated in a whole rehearsal"),
    healthy("ok-dqn-few-updates", "--gradient-steps", "4"),
    healthy("ok-dqn-accumulate", "--train.accumulate", "3"),
    healthy("ok-dqn-sparse-reward", "--env", "MountainCar-v0", naive="every return is -200: not learning"),
    healthy("ok-dqn-squared-error", naive="not Huber's loss",
            hunk=("error = F.smooth_l1_loss(", "error = 0.5 * F.mse_loss(")),
    healthy("ok-dqn-soft-target", naive="the target network is never copied",
            hunk=(FOLLOW, "            target.follow(policy, 0.005)\n")),
    healthy("ok-dqn-stacked", "--frame-stack", "3"),
    healthy("ok-dqn-one-hot-observations", "--env", "Taxi-v4"),
]  # fmt: skip
SAMPLED = ()  # make verify has them all; as it is, every recipe is checked by tests/core/test_recipes.py
