"""`formula` on losses of no published form that the gate knows: what follows the advantages, or the targets, is quiet; what does not is stopped."""

import pytest

from tests.helpers.sampling import sample
from tests.rl.test_rl_objectives import failed

CLIPPED = """torch.min(
            ratio * batch["advantage"], ratio.clamp(1 - cfg.clip_range, 1 + cfg.clip_range) * batch["advantage"]
        )"""
LARGER = 'torch.max((value - batch["return"]).square(), (near - batch["return"]).square())'
TAKEN = 'F.smooth_l1_loss(model.of(batch["observation"], batch["action"]), batch["return"], reduction="none")'
OFF = '(model.of(batch["observation"], batch["action"]) - batch["return"])'
SQUARED = "0.5 * error.square().sum()"
LOWEST = 'model.worth(batch["observation"], action, frozen=True).amin(0)'
TRADED = "(model.log_temperature.detach().exp() * log_prob - gain).sum()"
SURPLUS = "(model.log_temperature * surplus).sum()"
WORTH = LOWEST.removesuffix(".amin(0)")
HEALTHY = {
    "sac-log-cosh": ("rl/sac", SQUARED, "error.cosh().log().sum()"),
    "sac-mean-less-deviation": ("rl/sac", LOWEST, f"(lambda q: q.mean(0) - 0.5 * q.std(0))({WORTH})"),
    "sac-twice-the-policy": ("rl/sac", TRADED, f"2 * {TRADED} + 0.01 * gain.sum()"),
    "ppo-soft-clip": ("rl/ppo", CLIPPED, '2 * (2 * (ratio - 1)).sigmoid() * batch["advantage"]'),  # Chen 2023
    "ppo-rollback": (  # Wang 2020
        "rl/ppo",
        CLIPPED,
        'torch.min(ratio * batch["advantage"], (1.3 * ratio.clamp(1 - cfg.clip_range, 1 + cfg.clip_range) - 0.3 * ratio) * batch["advantage"])',
    ),
    "ppo-log-cosh": ("rl/ppo", LARGER, '2 * (value - batch["return"]).cosh().log()'),
    "dqn-log-cosh": ("rl/dqn", TAKEN, f"{OFF}.cosh().log()"),
}
BUGS = {
    "sac-one-critic-away": ("rl/sac", SQUARED, "(error.square() * torch.tensor([[0.5], [-0.5]])).sum()", "driven away"),
    "sac-more-of-the-higher": (
        "rl/sac",
        LOWEST,
        f"(lambda q: 0.2 * q.amin(0) + 0.8 * q.amax(0))({WORTH})",
        "the higher value counts more",
    ),
    "sac-logarithm-for-temperature": (
        "rl/sac",
        TRADED,
        "(-0.1 * model.log_temperature.detach() * log_prob - gain).sum()",
        "the temperature is",
    ),
    "sac-no-target-entropy": (
        "rl/sac",
        SURPLUS,
        "(-model.log_temperature * log_prob.detach()).sum()",
        "not at the target entropy",
    ),
    "ppo-advantages-squared": (
        "rl/ppo",
        CLIPPED,
        'ratio.clamp(max=1.2) * batch["advantage"].square()',
        "along their advantage",
    ),
    "ppo-nothing-holds": (
        "rl/ppo",
        CLIPPED,
        '(1.1 * ratio + 0.1 * ratio.square()) * batch["advantage"]',
        "nothing holds the ratio",
    ),
    "ppo-value-and-rollout": ("rl/ppo", LARGER, '(value - 0.5 * batch["value"]).square()', "cannot be read"),
    "dqn-driven-away": ("rl/dqn", TAKEN, f"{OFF}.square().neg().exp()", "driven away"),
}


@pytest.mark.parametrize("name", sample(HEALTHY, "ppo-soft-clip", "dqn-log-cosh", "sac-mean-less-deviation"))
def test_a_loss_that_does_what_the_formula_does_is_quiet(name: str, launch, fork):
    recipe, old, new = HEALTHY[name]
    fork((old, new), recipe=recipe)
    done = launch("check", "mine.py", "--only", "formula", code=0)
    assert "of the recipe's own" in done.verdicts()[0]["measured"], done.shown


@pytest.mark.parametrize("name", sample(BUGS, "ppo-advantages-squared", "dqn-driven-away", "sac-more-of-the-higher"))
def test_a_loss_that_does_not_is_stopped(name: str, launch, fork):
    recipe, old, new, words = BUGS[name]
    fork((old, new), recipe=recipe)
    done = launch("check", "mine.py", "--only", "formula", code=3)
    assert words in failed(done)["formula"]["measured"] + failed(done)["formula"]["remedy"], done.shown
