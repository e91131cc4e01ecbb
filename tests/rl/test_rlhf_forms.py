"""rl/rlhf's gate `formula` on losses of another form: what follows advantages and returns is quiet, what does not is named."""

from pathlib import Path

import pytest

from tests.helpers import language
from tests.helpers.sampling import sample
from tests.rl.test_rlhf import SMALL

GAIN = 'torch.min(ratio * batch["advantage"], ratio.clamp(1 - cfg.clip_range, 1 + cfg.clip_range) * batch["advantage"])'
ERROR = 'torch.max((value - batch["return"]).square(), (near - batch["return"]).square())'
HEALTHY = {
    "soft-clip": (GAIN, '2 * (2 * (ratio - 1)).sigmoid() * batch["advantage"]'),  # Chen 2023
    "hubers-loss": (ERROR, '2 * torch.nn.functional.huber_loss(value, batch["return"], reduction="none")'),
    "log-cosh": (ERROR, '2 * (value - batch["return"]).cosh().log()'),
}
BUGS = {
    "mean": ('-gain[valid].sum()', "-gain[valid].mean()", "a mean over the tokens"),
    "not-clipped": (GAIN, 'ratio * batch["advantage"]', "the ratio is not clipped"),
    "inverted": ("- batch[\"log_prob\"]).exp()", "- batch[\"log_prob\"]).neg().exp()", "along their advantage"),
    "lower-error": (ERROR, ERROR.replace("max", "min"), "the lower of the two errors"),
    "no-clip-of-values": (ERROR, '(value - batch["return"]).square()', "--clip-range-vf inf"),
    "away-from-returns": (ERROR, '-(value - batch["return"]).cosh().log()', "driven away from their target"),
}  # fmt: skip


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return language.write(tmp_path_factory.mktemp("net"))


@pytest.mark.parametrize("name", sample(HEALTHY, "soft-clip"))
def test_a_loss_that_does_what_ppos_does_is_quiet(name: str, net: Path, fork, launch):
    fork(HEALTHY[name], recipe="rl/rlhf")
    done = launch("check", "mine.py", "--model", net, *SMALL, "--only", "formula", code=0)
    assert "of another form, with the right gradients" in done.stdout


@pytest.mark.parametrize("name", sample(BUGS, "mean", "lower-error"))
def test_one_that_does_not_is_named(name: str, net: Path, fork, launch):
    old, new, words = BUGS[name]
    fork((old, new), recipe="rl/rlhf")
    done = launch("check", "mine.py", "--model", net, *SMALL, "--only", "formula", code=3)
    assert words in done.stdout
