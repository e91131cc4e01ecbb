"""Healthy variants of rl/dqn, among them those that look like bugs."""

from tests.helpers.plant import Healthy
from tests.rl import healthy_ppo
from tests.rl.planted_dqn import FOLLOW


def healthy(id: str, *argv: str, naive: str = "", hunk=None) -> Healthy:
    return Healthy(id, argv, hunk, naive, recipe="rl/dqn", may_skip=(*healthy_ppo.SKIPS, "terms"))


TARGETS = """    worth = target(rows["following"])
    best = (policy(rows["following"]) if cfg.double else worth).argmax(-1, keepdim=True)
    return rows["earned"] + rows["counts"] * (worth.gather(-1, best).squeeze(-1) * target.returns.rms)
"""
MUNCHAUSEN = """    tau, worth = 0.03, target(rows["following"])
    log_p = (worth / tau).log_softmax(-1)
    soft = (log_p.exp() * (worth - tau * log_p)).sum(-1)
    own = (target(rows["observation"]) / tau).log_softmax(-1).gather(-1, rows["action"][:, None]).squeeze(-1)
    return rows["earned"] + target.returns.rms * (0.9 * (tau * own).clamp(-1, 0) + rows["counts"] * soft)
"""

VARIANTS = [
    healthy_ppo.shaped("ok-dqn-shaped-by-end", healthy_ppo.FALLEN, "rl/dqn", "--n-step", "3", more=("terms",)),
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
    Healthy("ok-dqn-munchausen", (), (TARGETS, MUNCHAUSEN), "targets are not those of the definition", recipe="rl/dqn",
            may_skip=(*healthy_ppo.SKIPS, "terms", "targets")),
    healthy("ok-dqn-expected-sarsa", naive="targets are not those of the definition",
            hunk=("worth.gather(-1, best).squeeze(-1) * target.returns.rms)",
                  "(0.96 * worth.gather(-1, best).squeeze(-1) + 0.04 * worth.mean(-1)) * target.returns.rms)")),
    healthy("ok-dqn-replay-in-half", naive="stored observations are not those that were played",
            hunk=('return {"observation": steps["observation"][0], ',
                  'steps = steps | {k: steps[k].half().float() for k in ("observation", "next_observation")}\n'
                  '    return {"observation": steps["observation"][0], ')),
    healthy("ok-dqn-stacked", "--frame-stack", "3"),
    healthy("ok-dqn-one-hot-observations", "--env", "Taxi-v4"),
]  # fmt: skip
SAMPLED = ()  # make verify has them all; as it is, every recipe is checked by tests/core/test_recipes.py
