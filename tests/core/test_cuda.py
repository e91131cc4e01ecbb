"""On an accelerator: the same commands, in every precision, without a host sync in the loop. Skipped where there is none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import patched
from tests.helpers.commands import execute, losses, read, run_folder
from tests.vision.planted_classify import STAGES, staged

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
QUICK = ("--train.epochs", "1", "--run.no-tensorboard")


def launch(*argv: str, cwd: Path) -> subprocess.CompletedProcess:
    path = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), "PYTHONSAFEPATH": "1"}
    return execute(sys.executable, "-m", "trainworthy.launch", *argv, cwd=cwd, env=env)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_gates_and_training(precision: str, tmp_path: Path):
    done = launch("vision/classify", *QUICK, "--train.precision", precision, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gates passed" in done.stdout or "verdicts are remembered" in done.stdout
    seen = losses(run_folder(tmp_path))
    assert len(seen) == 63
    assert sum(seen[-5:]) < 0.95 * sum(seen[:5])
    assert read(run_folder(tmp_path) / "summary.json")["skipped_steps"] == []


def test_a_bad_step_is_skipped_on_the_device(tmp_path: Path):
    source = (Path(__file__).parents[2] / "recipes" / "vision" / "classify.py").read_text()
    old = 'batch["label"], label_smoothing=cfg.label_smoothing, reduction="sum")'
    bad = f'{old} * (float("nan") if (batch["label"] == 3).sum() > 11 and model.training else 1)'
    (tmp_path / "mine.py").write_text(patched(source, (old, bad)))
    done = launch("mine.py", *QUICK, "--gates.no-enabled", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    skipped = read(run_folder(tmp_path) / "summary.json")["skipped_steps"]
    assert skipped
    rows = losses(run_folder(tmp_path))
    assert all(rows[s - 1] == "nan" for s in skipped)
    assert isinstance(rows[-1], float)


def test_a_step_does_not_wait_for_the_device():
    from accelerate import Accelerator
    from trainworthy.core import Run
    from trainworthy.core.gates.gate import build
    from trainworthy.core.loop.run import Rehearsal
    from trainworthy.recipes.vision import classify

    cfg = classify.tiny()
    cfg.loader.workers = 0
    run = Run(cfg, Accelerator(), rehearsal=Rehearsal(steps=4))
    stage = build(run, lambda r: classify.classify(cfg, r))
    batch = {
        k: v.cuda()
        for k, v in stage.data["train"].collate([stage.data["train"].get(i, None) for i in range(32)]).items()
    }
    run.update(stage, [batch])  # lazily made state may sync once
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            run.update(stage, [batch])
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_batch_sees_the_devices_memory(tmp_path: Path):
    done = launch("batch", "vision/classify", "--largest", "256", "--no-augment", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = tmp_path.glob("runs/*/checks/*/plots/batch_classify.json")
    trials = read(found)["trials"]
    assert trials[-1]["memory"] > 2 * trials[0]["memory"] > 0
    assert trials[-1]["samples_per_sec"] > 10 * trials[0]["samples_per_sec"], "256 take hardly longer than one"


def test_batch_ends_where_the_device_does(tmp_path: Path):
    """A loss that asks for 1/40 of the device's memory per sample."""
    share = torch.cuda.mem_get_info()[1] // 40
    greedy = staged(f"""shown = stage.loss
def loss(model, batch):
    held = torch.empty({share} * len(batch["label"]), dtype=torch.uint8, device=batch["label"].device)
    return {{k: v + 0 * held[0] for k, v in shown(model, batch).items()}}
stage.loss = loss""")
    source = (Path(__file__).parents[2] / "recipes" / "vision" / "classify.py").read_text()
    (tmp_path / "mine.py").write_text(patched(source, (STAGES, greedy)))
    done = launch("batch", "mine.py", "--no-augment", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = tmp_path.glob("runs/*/checks/*/plots/batch_classify.json")
    assert 32 <= read(found)["largest"] < 40
    assert "run out of the device's memory" in done.stdout
