"""Healthy variants of rl/ppo, among them those that look like bugs."""

from tests.helpers.plant import Healthy

SKIPS = (
    "data",
    "leakage",
    "fabricated",
    "initial-loss",
    "init",
    "overfit",
    "baseline",
    "loader",
    "range-test",
    "tiny-data",
    "probe-memory",
    "memory",
)


def healthy(id: str, *argv: str, hunk=None, naive: str = "") -> Healthy:
    return Healthy(id, argv, hunk, naive, recipe="rl/ppo", may_skip=SKIPS)


FOLLOWED = "        followed = {k: v.to(run.device) for k, v in envs.step(action).items()}\n"
CENTRED = (
    FOLLOWED + '        followed["reward"] = followed["reward"] - 0.1 * followed["next_observation"][:, 0].abs()\n'
)
FALLEN = FOLLOWED + '        followed["reward"] = followed["reward"] - 10.0 * followed["terminated"].float()\n'
TILTED = FOLLOWED + '        followed["reward"] = followed["reward"] - followed["next_observation"][:, 2].abs()\n'
OF_PROBES = ("targets", "probe-constant", "probe-observation", "probe-delay", "probe-limit", "probe-action", "probe-both", "probe-scale",
             "whitening", "exploration", "target", "next-action", "lower")  # fmt: skip


def shaped(id: str, line: str, recipe: str = "rl/ppo", *argv: str, more: tuple[str, ...] = ()) -> Healthy:
    """A reward that the loop shapes: the probes have other rewards, or other observations."""
    return Healthy(id, argv, (FOLLOWED, line), "targets that are not those of the environment's rewards", recipe=recipe,
                   may_skip=(*SKIPS, *OF_PROBES, *more))  # fmt: skip


VARIANTS = [
    shaped("ok-rl-shaped-by-place", CENTRED),
    shaped("ok-rl-shaped-by-end", FALLEN),
    shaped("ok-rl-shaped-by-tilt", TILTED),
    healthy("ok-rl-whitened-before-the-cut", naive="a minibatch's mean is not 0",
            hunk=("everyone = run.gather(batch[\"advantage\"])", "everyone = run.gather(rows[\"advantage\"])")),
    healthy("ok-rl-one-pass", "--update-epochs", "1", naive="the ratio is 1 everywhere"),
    healthy("ok-rl-no-value-clip", "--clip-range-vf", "inf"),
    healthy("ok-rl-no-entropy", "--ent-coef", "0.0", naive="a term without a gradient"),
    healthy("ok-rl-one-big-minibatch", "--train.batch-size", "2048"),
    healthy("ok-rl-monte-carlo", "--gae-lambda", "1"),
    healthy("ok-rl-undiscounted", "--gamma", "1", naive="values without a bound"),
    healthy("ok-rl-few-environments", "--num-envs", "2", "--num-steps", "256"),
    healthy("ok-rl-accumulate", "--train.accumulate", "3"),
    healthy("ok-15-sparse-reward", "--env", "MountainCar-v0", naive="every return is -200: not learning"),
    healthy("ok-rl-acrobot", "--env", "Acrobot-v1"),
    healthy("ok-rl-one-hot-observations", "--env", "Taxi-v4"),
    healthy("ok-rl-numbers", "--env", "Pendulum-v1", naive="actions beyond the range"),
    healthy("ok-rl-numbers-sparse", "--env", "MountainCarContinuous-v0"),
    healthy("ok-rl-stacked", "--frame-stack", "4", naive="an episode begins with four times the same"),
    healthy("ok-rl-stacked-hidden", "--env", "hidden/CartPole-v1", "--frame-stack", "3"),
    healthy("ok-rl-stacked-numbers", "--env", "Pendulum-v1", "--frame-stack", "2"),
    healthy("ok-rl-remembered", "--rnn-hidden-size", "16", "--num-steps", "32", "--train.batch-size", "64",
            naive="probabilities that hang on what is not in the observation"),
    healthy("ok-rl-remembered-numbers", "--env", "Pendulum-v1", "--rnn-hidden-size", "8", "--num-steps", "32", "--train.batch-size", "64"),
    healthy("ok-rl-higher-upper-bound", naive="not PPO's clip",
            hunk=("ratio.clamp(1 - cfg.clip_range, 1 + cfg.clip_range)", "ratio.clamp(1 - cfg.clip_range, 1.28)")),
    healthy("ok-rl-kl-penalty", naive="a policy's term that is not PPO's",
            hunk=('"policy": -gain.sum(),', '"policy": (-gain + 0.3 * (ratio - 1 - ratio.log())).sum(),')),
    healthy("ok-rl-kl-term", naive="a term that nobody knows",
            hunk=('"policy": -gain.sum(),', '"policy": -gain.sum(),\n            "kl": 0.1 * (ratio - 1 - ratio.log()).sum(),')),
    healthy("ok-rl-values-not-clipped-in-code", naive="an entry that nothing depends on",
            hunk=('error = torch.max((value - batch["return"]).square(), (near - batch["return"]).square())',
                  'error = (value - batch["return"]).square()')),
    healthy("ok-rl-values-by-huber", naive="a value loss that is not PPO's",
            hunk=('error = torch.max((value - batch["return"]).square(), (near - batch["return"]).square())',
                  'error = 2 * torch.nn.functional.smooth_l1_loss(value, batch["return"], reduction="none")')),
    healthy("ok-rl-low-rate", "--optim.lr", "1e-4"),
]  # fmt: skip
SAMPLED = ()  # make verify has them all; as it is, every recipe is checked by tests/core/test_recipes.py
