"""`exported` of llm/dpo, rl/grpo and rl/rlhf: a fresh process loads the export. Through the command, on a small language model."""

from pathlib import Path

import pytest

from tests.helpers import language
from tests.llm import planted_dpo
from tests.rl import planted_rlhf

SMALL = {
    "rl/rlhf": ("--reward", "tests.helpers.odd_rewards:letters", "--data.tokens", "40", "--data.max-bad", "1", "--rollout-batch-size",
                "16", "--train.batch-size", "8", "--max-new-tokens", "12", "--data.held-out", "16"),
    "llm/dpo": ("--lora-rank", "4", "--optim.lr", "3e-3", "--data.held-out", "8", "--data.max-length", "256", "--data.max-bad", "0.02"),
    "rl/grpo": ("--lora-rank", "4", "--data.held-out", "16", "--optim.lr", "3e-3", "--train.batch-size", "16", "--reward",
                "tests.helpers.odd_rewards:near"),
}  # fmt: skip
PLANTS = {
    p.id: p
    for p in (*planted_dpo.PLANTS, *planted_rlhf.PLANTS)
    if p.gate == "exported" or p.id == "dpo-pairs-interleaved"
}
QUICK = ("rlhf-export-without-its-scale",)


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return language.write(tmp_path_factory.mktemp("net"))


@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        pytest.param("rl/rlhf", ("--lora-rank", "4"), id="rlhf-adapters"),
        pytest.param("rl/rlhf", (), id="rlhf", marks=pytest.mark.verify),
        pytest.param("llm/dpo", (), id="dpo-adapters", marks=pytest.mark.verify),
        pytest.param("llm/dpo", ("--lora-rank", "0"), id="dpo", marks=pytest.mark.verify),
        pytest.param("rl/grpo", (), id="grpo-adapters", marks=pytest.mark.verify),
    ],
)
def test_the_export_answers_as_the_trained_model(recipe: str, more: tuple[str, ...], net: Path, launch):
    done = launch("check", recipe, "--model", str(net), *SMALL[recipe], *more, "--only", "exported")
    assert done.returncode == 0, done.shown
    (verdict,) = done.verdicts()
    assert verdict["verdict"] == "pass", done.shown
    assert verdict["evidence"]["gap"] < 1e-3, done.shown


@pytest.mark.parametrize("name", [pytest.param(k, marks=[pytest.mark.verify] * (k not in QUICK)) for k in PLANTS])
def test_a_wrong_export_is_stopped(name: str, net: Path, fork, launch):
    plant = PLANTS[name]
    fork(plant.hunk, recipe=plant.recipe)
    done = launch("check", "mine.py", "--model", str(net), *SMALL[plant.recipe], *plant.argv, "--only", plant.gate)
    assert done.returncode == 3, done.shown
    (verdict,) = done.verdicts()
    said = " ".join((verdict["measured"], verdict["needed"], verdict["remedy"])).lower()
    assert not [w for w in plant.words if w.lower() not in said], said
