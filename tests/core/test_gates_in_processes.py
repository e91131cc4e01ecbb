"""Every recipe in several processes: its metrics are those of one process, and sharded it trains what whole copies train
(tests/helpers/gates_in_processes.py)."""

import json
import sys
from pathlib import Path

import pytest
from trainworthy.core.recipe.registry import HOME, recipes

from tests.conftest import ROOT
from tests.helpers.commands import execute
from tests.helpers.settings import SHORT
from tests.helpers.smoke import STAND_INS

EVERY = sorted(e.id for e in recipes() if HOME in e.path.parents)
WHOLE = ("rl/dqn", "rl/ppo", "rl/rlhf", "rl/sac")
"""Recipes that refuse `--shard`: processes call their models unequally often."""
QUICK = ("vision/segment", "llm/dpo")
"""In the default set: a plain module, and a hosted trainer with a frozen reference."""


def measured(tmp_path: Path, stand_ins: Path, recipes: list[str], **how: object) -> list[dict]:
    """What the gates of these recipes say in several processes."""
    settings = {r: [*SHORT.get(r, ()), *map(str, STAND_INS.get(r, lambda home: ())(stand_ins))] for r in recipes}
    file = tmp_path / "asked.json"
    file.write_text(json.dumps({"processes": 2, "gates": ["sharding"], "shard": "full", "recipes": settings, **how}))
    done = execute(sys.executable, "-m", "tests.helpers.gates_in_processes", file, cwd=ROOT, code=0, timeout=1800)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert {one["recipe"] for one in found} == {*recipes}
    return found


@pytest.mark.parametrize("recipe", [pytest.param(r, marks=[pytest.mark.verify] * (r not in QUICK)) for r in EVERY])
def test_sharded_it_trains_what_copies_train_and_metrics_are_those_of_one_process(
    recipe: str, stand_ins: Path, tmp_path: Path
):
    for one in measured(tmp_path, stand_ins, [recipe]):
        assert one["metrics"] == {}, one
        assert (recipe in WHOLE) == ("sharding" not in one)
        if recipe not in WHOLE:
            assert one["sharding"].startswith("pass: "), one
            assert "parameters on 2 processes" in one["sharding"]


@pytest.mark.verify
@pytest.mark.parametrize("recipe", EVERY)
def test_metrics_of_four_processes_are_those_of_one(recipe: str, stand_ins: Path, tmp_path: Path):
    for one in measured(tmp_path, stand_ins, [recipe], processes=4, gates=[]):
        assert one["metrics"] == {}, one


@pytest.mark.verify
@pytest.mark.parametrize("recipe", [r for r in EVERY if r not in WHOLE])
def test_it_resumes_from_its_shards(recipe: str, stand_ins: Path, tmp_path: Path):
    for one in measured(tmp_path, stand_ins, [recipe], gates=["resume"], metrics=False):
        assert one["resume"].startswith(("pass: ", "skip: ")), one
