"""`with trainworthy.watch():` in long programs and notebooks: what was built before the block, in fresh processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, TensorDataset
from trainworthy.core.base.errors import UserError

import trainworthy
from tests.conftest import ROOT
from tests.helpers.commands import environment

CELLS = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(512, 8)
data = TensorDataset(x, (x[:, 0] > 0).long())
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)

def train(epochs=2):
    for _ in range(epochs):
        model.train()
        for i, (a, b) in enumerate(DataLoader(data, 16, shuffle=True)):
            (cross_entropy(model(a), b) / 4).backward()
            if i % 4 == 3:
                clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            [model(a) for a, _ in DataLoader(data, 64)]

train()
import trainworthy
with trainworthy.watch() as seen:
    train()

print("LOOKED", seen.steps, {v.id: v.verdict for v in seen.verdicts})
with trainworthy.watch() as seen:
    train()

print("AGAIN", {v.verdict for v in seen.verdicts})
"""
"""Cells of a notebook: the second and the third train on, watched."""


def cells(text: str, folder: Path, *how: str) -> subprocess.CompletedProcess:
    """Run the cells in a fresh process: `-i` reads them as typed, else they are executed like a notebook's."""
    env = environment(PYTHONPATH=str(ROOT))
    if how:
        return subprocess.run(
            [sys.executable, *how], input=text, cwd=folder, env=env, capture_output=True, text=True, timeout=300
        )
    (folder / "cells.txt").write_text(text)
    code = "scope = {'__name__': '__main__'}\nfor cell in open('cells.txt').read().split('\\n\\n'): exec(cell, scope)"
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True, timeout=300
    )


def test_watch_is_quiet_in_an_interactive_session(tmp_path: Path):
    """Functions imported by name, an optimiser and a scheduler from an earlier cell, accumulation, the same model again."""
    done = cells(CELLS, tmp_path, "-i")
    said = done.stdout + done.stderr
    assert "LOOKED 16" in done.stdout, said
    assert "watch:" not in done.stdout, said
    for check in ("wiring", "gradients", "clipping", "schedule", "modes", "loss-input"):
        assert f"'{check}': 'pass'" in done.stdout, said
    assert "advice" not in done.stdout, said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("optimizer.zero_grad()", "pass", "zero_grad() is missing"),
        pytest.param("model.eval()", "pass", "model.eval() is missing", marks=pytest.mark.verify),
    ],
    ids=["zero-grad", "eval"],
)
def test_watch_tells_a_fault_in_cells_that_are_executed(old: str, new: str, words: str, tmp_path: Path):
    done = cells(CELLS.replace(old, new), tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"likely cause: {words}" in done.stdout, done.stdout + done.stderr


def loop(model: nn.Module, optimizer: torch.optim.Optimizer, *, workers: int = 0, fails: bool = False) -> None:
    x = torch.randn(128, 8)
    for i, (a, b) in enumerate(DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), 16, num_workers=workers)):
        optimizer.zero_grad()
        cross_entropy(model(a), b).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if fails and i == 5:
            raise ValueError("the loop's own")


def test_watch_keeps_the_loops_exception_and_says_when_nothing_trains():
    said: list[str] = []
    model = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ValueError, match="the loop's own"), trainworthy.watch(say=said.append) as seen:
        loop(model, optimizer, fails=True)
    assert seen.steps == 6
    assert seen.verdicts
    assert not any("watch: no optimiser" in text for text in said)
    with trainworthy.watch(say=said.append):
        pass
    assert "no optimiser made a step" in said[-1]


def test_watch_writes_a_row_for_each_epoch_and_says_why_the_run_ended(tmp_path: Path):
    """Two whole epochs with an evaluation after each; the third one raises."""
    x = torch.randn(64, 8)
    data = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), 16)
    torch.manual_seed(0)
    model = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses: list[float] = []

    def epochs() -> None:
        for _ in range(2):
            loop(model, optimizer)
            with torch.no_grad():
                losses[:] = [cross_entropy(model(a), b).item() for a, b in data]
        loop(model, optimizer, fails=True)

    with pytest.raises(ValueError, match="the loop's own"), trainworthy.watch(tmp_path, say=lambda _: None):
        epochs()
    rows = [json.loads(line) for line in (tmp_path / "epoch_metrics.jsonl").read_text().splitlines()]
    steps = [json.loads(line) for line in (tmp_path / "step_metrics.jsonl").read_text().splitlines()]
    assert [(r["epoch"], r["step"]) for r in rows] == [(1, 8), (2, 16), (3, 22)]
    assert rows[1]["train/loss"] == pytest.approx(sum(r["step/loss"] for r in steps[8:16]) / 8, rel=1e-5)
    assert rows[1]["val/loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    page = (tmp_path / "report.html").read_text()
    assert "it raised ValueError: the loop&#x27;s own" in page
    assert "why it ended" in page


def test_watch_inside_watch_is_refused_and_leaves_the_first_one_working():
    model = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with trainworthy.watch() as seen:
        with pytest.raises(UserError, match="observed already"), trainworthy.watch():
            pass
        loop(model, optimizer)
    assert seen.steps == 8
    assert globals()["cross_entropy"] is F.cross_entropy


def test_watch_lets_the_workers_of_a_dropped_iterator_end():
    """A loop that leaves its loader with `break` drops the iterator; the observer must not keep its workers alive."""
    import multiprocessing

    before = set(multiprocessing.active_children())
    with trainworthy.watch(say=lambda _: None) as seen:
        for _ in range(3):
            for _batch in DataLoader(TensorDataset(torch.randn(64, 4)), 4, num_workers=1):
                break
        assert len(seen.passes) == 3
        assert not set(multiprocessing.active_children()) - before


WATCHED = """
import torch
import trainworthy

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
with trainworthy.watch("mine"):
    for i in range(8):
        optimizer.zero_grad()
        model(torch.randn(4, 4)).mean().backward()
        optimizer.step()
"""

DEAF = """
import signal
import torch
from torch.utils.data import DataLoader

def deaf(_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
batches = iter(DataLoader(torch.randn(64, 4), 4, num_workers=2, worker_init_fn=deaf))
for i in range(6):
    optimizer.zero_grad()
    model(next(batches)).mean().backward()
    optimizer.step()
raise ValueError("mine")
"""


def test_watch_of_a_script_ends_with_it_although_workers_ignore_sigterm(launch, tmp_path: Path):
    """It raises while the iterator is held: Python alone would wait for the workers for ever."""
    (tmp_path / "train.py").write_text(DEAF)
    done = launch("watch", "train.py", timeout=60)
    assert done.returncode == 1, done.shown
    assert "ValueError: mine" in done.stderr


@pytest.mark.parametrize("kind", ["script", "loop"])
def test_watch_does_not_see_what_a_check_rehearses(kind: str):
    """A program that checks itself first: the check observes its own rehearsals, and `watch` the training after it."""
    rows = TensorDataset(torch.randn(64, 8, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 2)

    def factory():
        model = nn.Linear(8, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if kind == "loop":
            batches = DataLoader(rows, 8, shuffle=True)
            return trainworthy.Loop(models=model, optimizers=optimizer, batches=batches, seconds=0.1,
                                    run=lambda given: [_step(model, optimizer, batch) for batch in given])  # fmt: skip
        return trainworthy.Script(model=model, optimizer=optimizer, train=rows, val=rows, classes=2, metric=lambda *_: 0.5,
                                  loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
                                  train_loop=lambda model, optimizer, given: [_step(model, optimizer, b) for b in given])  # fmt: skip

    model = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with trainworthy.watch(say=lambda _: None) as seen:
        result = trainworthy.check(factory, only="modes,gradients", raises=False)
        loop(model, optimizer)
    assert [v.id for v in result.verdicts if "observed already" in (v.reason or "")] == []
    assert any(v.id == "gradients" and v.verdict == "pass" for v in result.verdicts), result.table()
    assert (seen.steps, sum(one.steps > 0 for one in seen.groups.values())) == (8, 1)
    assert globals()["cross_entropy"] is F.cross_entropy


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: list[torch.Tensor]) -> None:
    optimizer.zero_grad()
    cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()


def test_a_script_that_watches_itself_may_be_watched(tmp_path: Path, launch):
    """`trainworthy watch` observes the whole script: it ended a healthy one that has the call of docs/own-scripts.md in it."""
    (tmp_path / "train.py").write_text(WATCHED)
    done = launch("watch", "train.py", code=0)
    assert "trainworthy.watch() in the script is left out" in done.stderr
    assert "watch  8 steps" in done.stderr
    assert not (tmp_path / "mine").exists()


def test_a_file_next_to_the_script_is_named_if_guard_starts_elsewhere(tmp_path: Path, launch):
    """A script that opens `conf.yaml` works in its own folder only; `python scripts/train.py` fails in the same way."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "conf.yaml").write_text("lr: 0.1\n")
    (tmp_path / "scripts" / "train.py").write_text('open("conf.yaml")\n' + WATCHED)
    done = launch("guard", "scripts/train.py", code=2)
    assert "scripts/conf.yaml is next to the script" in done.stderr
    assert "cd scripts && trainworthy guard train.py" in done.stderr


@pytest.mark.parametrize("reset", [True, False])
def test_a_long_training_in_a_function(reset: bool):
    """Its optimiser is gone when it returns, and of its steps some are looked at: `watch` skipped the one and divided by all of the other."""

    def train() -> None:
        torch.manual_seed(0)
        x = torch.randn(2400, 8)
        data = TensorDataset(x, (x[:, 0] > 0).long())
        first, last = nn.Linear(8, 32), nn.Linear(32, 2)
        optimizer = torch.optim.AdamW((nn.Sequential(first, last) if reset else last).parameters(), 1e-2)
        for a, b in DataLoader(data, 16, shuffle=True):
            if reset:
                optimizer.zero_grad()
            cross_entropy(last(F.relu(first(a))), b).backward()
            optimizer.step()

    with trainworthy.watch(say=lambda _: None) as watched:
        train()
    found = {v.id: v for v in watched.verdicts}
    assert (found["gradients"].verdict == "pass") == reset, found["gradients"]
    if reset:
        assert "150 steps" in found["gradients"].measured
    else:
        assert "zero_grad() is missing" in found["gradients"].remedy


RAISES = """
import torch
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for i in range(9):
    torch.nn.functional.cross_entropy(model(torch.randn(8, 4 + (i == 6))), torch.zeros(8).long()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
ASKS = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--x', required=True)\nparser.parse_args()\n"


def test_a_watched_script_that_raises_or_needs_arguments(tmp_path: Path, launch):
    """The traceback began with four frames of ours; what argparse asked for was called a block without an optimiser's step."""
    (tmp_path / "raises.py").write_text(RAISES)
    (tmp_path / "asks.py").write_text(ASKS)
    done = launch("watch", "raises.py", code=1)
    assert "watch  the script raised at step 6; until here: " in done.stderr
    assert done.stderr.index("Traceback") < done.stderr.index('raises.py", line 6') < done.stderr.index("mat1 and mat2")
    assert "guard/commands" not in done.stderr
    done = launch("watch", "asks.py", code=2)
    assert "with arguments: trainworthy watch asks.py -- ARGUMENTS" in done.stderr
