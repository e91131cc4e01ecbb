"""Every recipe on a device that is not the host (tests/helpers/stand_in.py, which says what it cannot see). More of rl/ppo: tests/rl."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from trainworthy.core.recipe.registry import HOME, recipes

from tests.conftest import ROOT
from tests.helpers.settings import SHORT
from tests.helpers.smoke import STAND_INS

GATES = ("schema", "wiring", "evaluation", "dependency", "accumulation", "resume", "storage", "entries")
"""They read data, train four steps, evaluate, save, resume, and read every entry of a batch."""
LONGER = ()
"""Of `make verify`."""


def cases() -> list:
    found = [e.id for e in recipes() if HOME in e.path.parents]
    return [pytest.param(r, id=r, marks=[pytest.mark.verify] * (r in LONGER)) for r in found]


@pytest.mark.parametrize("recipe", cases())
def test_a_recipe_on_a_device_that_is_not_the_host(recipe: str, stand_ins: Path):
    """Every gate passes or says why it does not apply; each stage trains and is evaluated there."""
    settings = SHORT.get(recipe, ("--train.epochs", "0.32")) + STAND_INS.get(recipe, lambda home: ())(stand_ins)
    argv = ["-m", "tests.helpers.stand_in", recipe, f"--only={','.join(GATES)}", *settings]
    done = subprocess.run([sys.executable, *argv], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert not {k: v for k, v in found.items() if v != "pass" and not v.startswith("skip: ")}, found
    stages = {name.split()[0] for name in found}
    assert all(found[f"{stage} {gate}"] == "pass" for stage in stages for gate in ("schema", "wiring")), found
