"""A policy that gets the first observation for ever."""

import numpy as np
import torch
from trainworthy.guard.measures.control.policy_rewards import Credit, unmoved

from tests.guard.guarding import SCRIPTS, guard

LINE = "            obs, reward, terminated, truncated, _ = envs.step(action.numpy())\n"


def played(*, moves: bool, steps: int = 150) -> bool:
    draw, one = np.random.default_rng(0), Credit()
    rows = draw.normal(size=(4, 3)).astype(np.float32)
    one.seen(1, (rows, {}))
    for _ in range(steps):
        one.root(torch.from_numpy(rows), None)
        new = draw.normal(size=(4, 3)).astype(np.float32)
        one.seen(1, (new, np.ones(4), np.zeros(4, bool), np.zeros(4, bool), {}))
        rows = new if moves else rows
    return unmoved(one) is not None


def test_only_inputs_that_never_change_are_a_fault():
    assert played(moves=False)
    assert not played(moves=True)
    assert not played(moves=False, steps=50)  # too few to tell
    assert unmoved(Credit()) is None


def test_guard_names_the_observation_that_is_kept(tmp_path):
    source = (SCRIPTS / "ninth" / "a2c_cartpole.py").read_text()
    assert source.count(LINE) == 1
    verdicts, output, _ = guard(
        source.replace(LINE, LINE.replace("obs,", "next_obs,")), tmp_path, **{"--only": "direction"}
    )
    assert verdicts["direction"].blocks, output
    assert "obs = next_obs is missing" in output
