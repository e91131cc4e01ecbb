"""Recipes on a device that is not the host (tests/helpers/stand_in.py, which says what it cannot see). More of rl/ppo: tests/rl."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from trainworthy.core.recipe.registry import HOME, recipes

from tests.conftest import ROOT
from tests.helpers.settings import SHORT
from tests.helpers.smoke import STAND_INS

LIGHT = ("schema", "wiring", "dependency", "finish")
"""They read the data, train four steps and evaluate once; `finish` draws figures and measures baselines, as a run does at its end."""
MORE = ("initial-loss", "evaluation", "accumulation", "resume", "storage", "entries")
"""They also save, load, and perturb every entry of a batch."""
RUN = (
    "vision/classify", "vision/segment", "vision/detect", "diffusion/pixel", "diffusion/latent", "diffusion/flow",
    "diffusion/text", "llm/pretrain", "llm/sft", "llm/dpo", "llm/reward", "rl/dqn", "rl/sac", "rl/grpo", "rl/rlhf",
    "distill/logits", "distill/compress", "distill/whisper", "vlm/instruct",
)  # fmt: skip
"""Recipes that have passed there."""


def verdicts(recipe: str, gates: tuple[str, ...], stand_ins: Path) -> dict[str, str]:
    settings = SHORT.get(recipe, ("--train.epochs", "0.32")) + STAND_INS.get(recipe, lambda home: ())(stand_ins)
    argv = ["-m", "tests.helpers.stand_in", recipe, f"--only={','.join(gates)}", *settings]
    done = subprocess.run([sys.executable, *argv], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_every_recipe_named_is_one():
    assert {e.id for e in recipes() if HOME in e.path.parents} >= {*RUN}


LONGER = (
    "diffusion/flow", "diffusion/latent", "diffusion/pixel", "diffusion/text", "vision/detect", "llm/dpo", "llm/reward",
    "llm/sft", "rl/grpo", "rl/sac", "distill/compress", "distill/logits", "distill/whisper", "llm/pretrain", "vision/segment",
)  # fmt: skip
"""Of `make verify`: more than ten seconds of CPU time, and a relative of one that `make test` runs."""


@pytest.mark.parametrize("recipe", [pytest.param(r, id=r, marks=[pytest.mark.verify] * (r in LONGER)) for r in RUN])
def test_data_training_and_evaluation_on_a_device_that_is_not_the_host(recipe: str, stand_ins: Path):
    found = verdicts(recipe, LIGHT, stand_ins)
    assert not {k: v for k, v in found.items() if v != "pass" and not v.startswith("skip: ")}, found
    stages = {name.split()[0] for name in found}
    assert all(found[f"{stage} {gate}"] == "pass" for stage in stages for gate in ("schema", "wiring")), found


@pytest.mark.verify
@pytest.mark.parametrize("recipe", RUN)
def test_more_gates_on_a_device_that_is_not_the_host(recipe: str, stand_ins: Path):
    found = verdicts(recipe, MORE, stand_ins)
    assert not {k: v for k, v in found.items() if v != "pass" and not v.startswith("skip: ")}, found
