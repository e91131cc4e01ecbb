"""Gates and advice where a model has hardly learnt: at a small rate, in 16 bits, in few steps, below adapters."""

import json
from types import SimpleNamespace

import pytest
import torch
from trainworthy.core.base import config
from trainworthy.core.data.pictures import contact_sheet
from trainworthy.core.gates.checks import class_means
from trainworthy.core.gates.checks.learning import _hardly_memorised
from trainworthy.core.monitoring.monitors import too_few_steps
from trainworthy.core.recipe.stage import Metric, Tile
from trainworthy.core.session import training

from tests.helpers.commands import holds

ACCURACY = Metric("accuracy", "which class?", 0.2, 1.0)


def test_an_input_that_16_bits_do_not_resolve_is_read(launch):
    """A head that starts at zero, after some steps of SGD: the loss changes by 2e-5 with the pictures, the limit of bf16 is 1e-4."""
    argv = ("--train.precision", "bf16", "--optim.name", "sgd", "--optim.lr", "1e-3")
    done = launch("check", "vision/classify", "--only", "entries", *argv, code=0)
    assert "not needed for the loss" not in done.stdout


def test_captions_are_text(tmp_path):
    """Prices, shell and LaTeX: a dollar sign is no formula. A failed gate draws its batch, whatever is written in it."""
    tiles = [Tile("for i in $(seq 5); do echo $i; done"), Tile("$5 to $9"), Tile(r"$\frac$", torch.zeros(4, 4, dtype=torch.uint8))]  # fmt: skip
    contact_sheet(tiles, tmp_path / "batch.png")
    assert (tmp_path / "batch.png").stat().st_size


@pytest.mark.parametrize(
    ("metric", "share", "hardly"),
    [(0.25, "", True), (0.9, "", False), (0.25, ": a mean over classes", False)],
    ids=["hardly-learnt", "answers", "few-classes"],
)
def test_what_was_hardly_memorised_is_not_compared(monkeypatch, metric: float, share: str, hardly: bool):
    """Whatever the loss is: with a broken evaluation it is at its floor, and one right answer of four may be chance."""
    monkeypatch.setattr(class_means, "share", lambda *_: share)
    stage = SimpleNamespace(gate_evaluator=SimpleNamespace(metric=ACCURACY))
    assert _hardly_memorised(None, stage, {"metric": metric, "goal": 1.0}) is hardly  # type: ignore[arg-type]


def test_a_result_at_chance_after_few_steps_names_the_steps():
    """145 pictures in 30 epochs of 64 are 68 steps; the gate had learnt them in 400."""
    tiny = {"id": "tiny-data", "verdict": "pass", "evidence": {"steps": 400, "held_out": {"own": 0.583}}}
    told = too_few_steps(ACCURACY, 0.417, 68, 30.0, [tiny])
    holds(told, "too few steps", "177 epochs")
    assert not too_few_steps(ACCURACY, 0.417, 375, 30.0, [tiny])  # long enough: it is something else
    assert not too_few_steps(ACCURACY, 0.6, 68, 30.0, [tiny])
    assert not too_few_steps(ACCURACY, 0.417, 68, 30.0, [tiny | {"verdict": "skip", "evidence": {}}])
    assert not too_few_steps(ACCURACY, 0.417, 68, 30.0, [])


def test_a_run_of_few_steps_is_announced_before_it_trains(tmp_path):
    """A run of minutes at chance said only at its end that it was too short, although its gates knew."""
    tiny = {"id": "tiny-data", "verdict": "pass", "evidence": {"steps": 280, "held_out": {"own": 0.506}}}
    (tmp_path / "gates.json").write_text(json.dumps({"gates": [tiny]}))
    lines: list[str] = []
    console, one = SimpleNamespace(say=lines.append), SimpleNamespace(total_steps=lambda stage: 151)
    session = SimpleNamespace(
        cfg=config.Config(train=config.Train(epochs=30, batch_size=64)), console=console, folder=tmp_path
    )
    training.print_length(session, one, SimpleNamespace(data={"train": range(322)}), "")
    holds("".join(lines), "151 steps of 64 samples", "few steps", "280", "0.506", "--train.epochs 56")
    one.total_steps = lambda stage: 280
    lines.clear()
    training.print_length(session, one, SimpleNamespace(data={"train": range(322)}), "")
    assert len(lines) == 1


def test_weights_of_a_net_without_any_are_refused(launch, tmp_path):
    from PIL import Image

    for split, name in ((s, c) for s in ("train", "val") for c in "ab"):
        (tmp_path / "set" / split / name).mkdir(parents=True)
        Image.new("L", (32, 32), 90 + len(split) + ord(name)).save(tmp_path / "set" / split / name / "1.png")
    for own in (("--data.path", "set"), ()):
        done = launch("check", "vision/classify", *own, "--weights", "DEFAULT", "--only", "schema", code=2)
        assert "--weights DEFAULT: the net `small` has none" in done.stderr
