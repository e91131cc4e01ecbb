"""Every planted bug is stopped by its gate before anything is trained; a non-finite step never reaches the weights."""

import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from trainworthy.core.gates import order
from trainworthy.core.recipe.registry import find

from tests.conftest import ROOT, Done, collected
from tests.helpers.commands import execute, holds
from tests.helpers.plant import Plant
from tests.vision.healthy_classify import DROPOUT_BY_FUNCTION
from tests.vision.planted_classify import UPDATE

PLANTS: list[Plant] = collected("planted_*.py", "PLANTS")
RELATIVES: list[str] = collected("planted_*.py", "RELATIVES")
QUICK = ("--gates.no-enabled", "--train.epochs", "0.5", "--run.no-tensorboard")  # 32 steps of the bare run


A_GATE = 1
"""Planted bugs of a gate that `make test` runs."""


def cases(*, quick: bool) -> list:
    """Every plant as a case; `quick` leaves relatives, and all but the first `A_GATE` of a gate, to `make verify`."""
    found, run = [], Counter()
    for p in PLANTS:
        marks = [pytest.mark.xfail(strict=True, reason=p.missed)] if p.missed else []
        left = p.id in RELATIVES or run[p.gate] >= A_GATE
        run[p.gate] += not left
        found.append(pytest.param(p, id=p.id, marks=[*marks, *([pytest.mark.verify] if quick and left else [])]))
    return found


def caught(
    plant: Plant,
    launch: Callable[..., Done],
    fork: Callable[..., Path],
    noted: Callable,
    seed: int,
    *,
    alone: bool = False,
) -> Done:
    """Check the bugged fork; the right gate must stop it, for the right reason. Only the gates up to that one run: what
    stands behind it cannot change which one is first. A domain's own gate, behind all of the core's, runs alone, as every gate does
    with `alone`."""
    fork(plant.hunk, recipe=plant.recipe)
    ids = [g.id for g in order.ORDER]
    whole = plant.gate in ids and not alone
    only = ids[: ids.index(plant.gate) + 1] if whole else [*plant.before, plant.gate]
    done = launch(
        "check", "mine.py", "--run.seed", str(seed), "--only", ",".join(only), *plant.argv, code=3, timeout=900
    )
    noted(done.verdicts())
    failed = [v for v in done.verdicts() if v["verdict"] == "fail"]
    assert failed[0]["id"] in (plant.gate, *plant.before), done.shown
    verdict = next((v for v in failed if v["id"] == plant.gate), None)
    assert verdict, done.shown
    assert plant.row in verdict["rows"].split(), verdict["rows"]
    said = " ".join((verdict["measured"], verdict["needed"], verdict["remedy"])).lower()
    assert not [w for w in plant.words if w.lower() not in said], said
    stage = done.folder() / "stages" / verdict["stage"]  # the last one's files are the run's own
    evidence = (stage if stage.is_dir() else done.folder()) / "gates" / plant.gate
    assert (evidence / "repro.py").is_file()
    if plant.batch:
        tensors = load_file(evidence / "batch.safetensors")
        assert len(tensors["image"]) == len(tensors["label"]) > 0
        assert (evidence / "batch.png").read_bytes().startswith(b"\x89PNG")
    return done


@pytest.mark.parametrize("plant", cases(quick=True))
def test_caught(plant: Plant, launch, fork, noted, request):
    """`make test` runs the gate alone; `make verify`, which keeps a record, also the gates before it."""
    caught(plant, launch, fork, noted, seed=0, alone=not request.config.getoption("--record"))


@pytest.mark.verify
@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.parametrize("plant", cases(quick=False))
def test_caught_at_every_seed(plant: Plant, seed: int, launch, fork, noted):
    caught(plant, launch, fork, noted, seed)


def test_plants_have_names_of_their_own():
    assert len({p.id for p in PLANTS}) == len(PLANTS)
    assert set(RELATIVES) <= {p.id for p in PLANTS}
    assert not [p.id for p in PLANTS if p.before and not p.why], "a plant that another gate meets first must say why"


def test_every_plant_still_has_its_place():
    """What only `make verify` plants must not rot unseen."""
    looks = [h for h in collected("healthy_*.py", "VARIANTS") if h.hunk]
    sources = {name: find(name).path.read_text() for name in {x.recipe for x in [*PLANTS, *looks]}}
    assert not [x.id for x in [*PLANTS, *looks] if sources[x.recipe].count(x.hunk[0]) != 1]


@pytest.mark.parametrize(
    "gate", ["schema", *(pytest.param(g, marks=pytest.mark.verify) for g in ("overfit", "resume"))]
)
def test_repro_fails_again_from_any_folder(gate: str, launch, fork, tmp_path: Path):
    """The script that a failed gate leaves proves the same failure again, wherever it is started."""
    plant = next(p for p in PLANTS if p.gate == gate and p.recipe == "vision/classify")
    fork(plant.hunk)
    script = launch("check", "mine.py", "--only", gate, *plant.argv).folder() / "gates" / gate / "repro.py"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    again = execute(sys.executable, script, cwd=elsewhere, code=3)
    assert f"FAIL   {gate}" in again.stdout


def test_a_lost_micro_batch_is_seen_behind_draws_of_the_model(launch, fork):
    """Dropout that no module announces changes with the cut; judged without it, what the loop loses still shows."""
    fork(DROPOUT_BY_FUNCTION)
    assert "in eval mode" in launch("check", "mine.py", "--only", "accumulation").stdout
    fork(DROPOUT_BY_FUNCTION, (UPDATE, UPDATE.replace("batches)", "batches[:1])")))
    done = launch("check", "mine.py", "--only", "accumulation", code=3)
    assert "in eval mode" in done.stdout


# ------------------------------------------------------------------------------------------------ the finite check (C17)
LOGITS = 'logits = model(batch["image"])\n        return {"ce"'


def bad_at(when: str) -> tuple[str, str]:
    """The loss is NaN where the expression `when` is true."""
    return LOGITS, LOGITS.replace("])\n", f"])\n        logits = torch.where({when}, torch.nan, logits)\n")


def test_bad_samples_are_skipped_counted_and_kept(launch, fork):
    """A loss that is NaN for certain samples from step 5 on: the run ends well, and says what it left out."""
    fork(bad_at('(batch["image"].mean((1, 2, 3), keepdim=True).flatten(1) > 0.28) & (run.step >= 5) & model.training'))
    done = launch("run", "mine.py", *QUICK, code=0)
    summary = json.loads((done.folder() / "summary.json").read_text())
    skipped = summary["skipped_steps"]
    assert 0 < len(skipped) < 25
    assert min(skipped) > 5
    for step in skipped:
        assert f"step {step}: loss nan" in done.stdout
        batch = load_file(done.folder() / "postmortem" / f"step-{step}.safetensors")
        assert batch["0/image"].mean((1, 2, 3)).max() > 0.28
    weights = load_file(done.folder() / "export" / "model.safetensors")
    assert all(torch.isfinite(t).all() for t in weights.values())
    assert summary["steps"] == 32
    assert summary["reported"]["accuracy"] > 0.12  # it trained on


def test_nothing_but_nan_stops_the_run(launch, fork):
    """NaN from step 5 on: exit 4 with the row and the cause; the weights kept are those of the last finite step."""
    fork(bad_at("torch.tensor((run.step >= 5) & model.training)"))
    done = launch("run", "mine.py", *QUICK, code=4)
    holds(done.stderr, "C17", "10 non-finite steps in a row")
    assert "Traceback" not in done.stderr
    assert len(list((done.folder() / "postmortem").iterdir())) == 10
    kept = load_file(done.folder() / "checkpoints" / "classify" / "latest" / "model.safetensors")
    assert all(torch.isfinite(t).all() for t in kept.values())


INTERNAL = re.compile(r"\w+\(\)|\b[a-z]+_[a-z_]+\b|\bdeclared\b|\bexpect\b")


def test_reasons_of_skipped_gates_are_in_plain_words():
    """An export's README quotes them to readers who do not know a recipe's code. A metric's name is one of its results."""
    found = []
    for path in (p for folder in ("core/gates", "recipes") for p in (ROOT / folder).rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "Skip":
                words = [c.value for c in ast.walk(call) if isinstance(c, ast.Constant) and isinstance(c.value, str)]
                text = " ".join(words).replace("macro_recall", "")
                found += [f"{path}:{call.lineno}: {text}"] if INTERNAL.search(text) else []
    assert not found, "\n".join(found)
