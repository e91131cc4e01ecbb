"""`trainworthy guard` on scripts of public shapes: healthy ones are quiet, real bugs are stopped, odd ones get a clear message."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from trainworthy.core.base.errors import Stop

import trainworthy
from tests.conftest import ROOT, patched
from tests.guard import common_scripts, outside, unseen, unseen_heldout
from tests.guard.guard_bugs import BUGS, Bug
from tests.guard.guarding import SCRIPTS, guard
from tests.guard.odd_scripts import ODD
from tests.helpers import patches
from tests.helpers.commands import read, run_folder, start, wait_until

HEALTHY = sorted(p.stem for p in SCRIPTS.glob("*.py"))
QUICK_ODD = ("stubborn", "overwrites", "arguments", "crash", "never-steps", "exits-early", "local-rank")
QUICK_BUGS = ("zero-grad", "optimizer-copy", "steplr-per-batch", "ranks-bare-model")

UNSEEN = {
    "visible-tokens-scored": "",
    "horizon-in-samples": "",
    "ema-swapped": "",
    "noise-without-root": "coefficient of the noise",
    "timestep-drawn-again": "drawn twice",
    "target-is-the-input": "shift by one",
    "token-zero-ignored": "a real token",
    "heads-by-reshape": "reshape()",
    "box-term-dropped": "left out of the sum",
    "perturbation-doubled": "subtracted again",
    "attack-descends": "sign of the attack's step is wrong",
    "generator-wants-fake": "wrong sign or label",
    "generator-flees-critic": "wrong sign or label",
    "triplet-order": "exchanged",
    "kl-without-exp": "exp() is missing",
    "reconstruction-mean": "reduction='sum'",
    "mixed-targets-exchanged": "exchanged between inputs and targets",
    "schedule-in-both-phases": "after the validation",
    "advantages-backwards": "reversed time",
    "critic-learns-advantages": "advantages + values",
    "rebound-not-updated": "p -= ...",
    "adapter-file-empty": "filter of what is saved",
    "edges-on-the-wrong-axis": "wrong axis",
    "optimiser-of-the-old-head": "replaced afterwards",
    "negatives-of-the-other-split": "partners",
    "columns-by-view": "view(bsz, -1).t()",
    "replay-of-the-oldest": "the buffer's first entries",
    "zero-grad-per-micro-batch": "zero_grad() is called for every batch",
    "best-by-reference": "copy.deepcopy",
    "encoder-detached": "cuts the graph",
}
"""Bugs that no check was designed for when they were written -> words of the cause that is named today."""
QUICK_UNSEEN = ("noise-without-root", "generator-flees-critic", "heads-by-reshape")

COMMON = {
    "ddpm--other_noise": "the noise is drawn twice",
    "cgan--range": "range of tanh",
    "lstm_windows--first_step": "out[:, -1] is meant",
    "multitask--wrong_head": "reads another output",
    "sentiment--no_sigmoid": "another threshold",
}
"""Bugs of a fourth set, half A, that were missed at first -> words of the cause that is named today."""

RANKS = {"ddp": {"--nproc": "2"}}  # scripts that a launcher starts

FEED = """
import torch

def draw(n=32):
    x = torch.randn(n, 8)
    return x, (x[:, 0] > 0.7).long() + 2 * (x[:, 1] > 0.7).long()
"""
LOOP = """
import argparse
import torch
from torch import nn
from torch.nn import functional as F
from pkg.feed import draw

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, required=True)
args = parser.parse_args()
torch.manual_seed(0)
PERM = torch.arange(32).roll(1)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
for step in range(400):
    x, y = draw()
    PERM = torch.randperm(32)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def failed(verdicts: dict) -> list[str]:
    """Verdicts that block, as text."""
    return [f"{v.id}: {v.measured}" for v in verdicts.values() if v.blocks]


def broken(bug: Bug) -> str:
    """The healthy script with the bug in it."""
    return patched((SCRIPTS / f"{bug.script}.py").read_text(), *bug.hunks)


def stopped(bug: Bug, folder: Path, **values: str) -> None:
    """The bug is stopped, and its cause is named."""
    probes = {"overfit", "metric", "signal"} & set(bug.checks)
    verdicts, output, _ = guard(broken(bug), folder, interventions=bool(probes), **RANKS.get(bug.script, {}), **values)
    blocks = [v for v in verdicts.values() if v.blocks]
    assert blocks, output
    text = " ".join(f"{v.measured} {v.remedy}" for v in blocks).lower()
    assert any(word.lower() in text for word in bug.words), output


def test_guard_command_is_quiet_on_an_mnist_script(launch, tmp_path):
    """The whole guard through the command: every rehearsal, evidence, page; the script's checkpoint is not in the folder."""
    (tmp_path / "mnist.py").write_text((SCRIPTS / "mnist.py").read_text())
    done = launch("guard", "mnist.py", "--seconds", "2", "--", "--epochs", "6")
    assert done.returncode == 0, done.shown
    out = run_folder(tmp_path, "runs/guard-mnist/*")
    verdicts = {v["id"]: v["verdict"] for v in read(out / "gates.json")["gates"]}
    assert verdicts["wiring"] == verdicts["gradients"] == verdicts["modes"] == verdicts["overfit"] == "pass", done.shown
    assert "no check failed" in (out / "report.html").read_text()
    assert not (tmp_path / "mnist_cnn.pt").exists()


def test_guard_command_stops_a_bug_and_can_be_waived(launch, tmp_path):
    """Exit 3 with the cause; 0 with a waiver."""
    source = patched((SCRIPTS / "mnist.py").read_text(), ("    model.eval()\n", ""))
    (tmp_path / "mnist.py").write_text(source)
    words = ("guard", "mnist.py", "--seconds", "0.5", "--no-interventions")
    done = launch(*words)
    assert done.returncode == 3, done.shown
    assert "model.eval() is missing" in done.stdout
    done = launch(*words, "--waive", "modes", "--because", "dropout at evaluation on purpose")
    assert done.returncode == 0, done.shown


def test_guard_refuses_bad_usage(launch, tmp_path):
    """One message, exit 2."""
    for argv, words in (
        (("guard",), "guard what?"),
        (("guard", "nowhere.py"), "no script nowhere.py"),
        (("guard", "-m", "no.such.module"), "no module"),
        (("guard", "--stepz", "3", "x.py"), "unknown option --stepz"),
        (("guard", "x.py", "--lr", "3"), "own arguments after --"),
        (("guard", "n.ipynb"), "jupyter nbconvert --to script n.ipynb"),
        (("guard", "run.sh"), "grep -n python run.sh"),
        (("guard", "syntax.py"), "syntax.py:2\n"),
        (("guard", "pkg"), "pkg is a folder\n  got:          more.py, train_net.py\n"),
        (("watch", "pkg"), "trainworthy watch pkg/train_net.py"),
        (("guard", "pkg/train_nets.py"), "trainworthy guard pkg/train_net.py"),
    ):
        for name, text in (
            ("x.py", ""),
            ("n.ipynb", "{}"),
            ("run.sh", "python x.py"),
            ("syntax.py", "x = 1\ndef f(:\n"),
            ("pkg/train_net.py", ""),
            ("pkg/more.py", ""),
        ):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        done = launch(*argv)
        assert done.returncode == 2, done.shown
        assert words in done.stderr, done.shown
        assert "Traceback" not in done.stderr


def test_guard_rehearses_a_module_with_batches_from_a_function(launch, tmp_path):
    """`-m pkg.train` as python would start it; its batches come from a function of another module."""
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "feed.py").write_text(FEED)
    (package / "train.py").write_text(LOOP)
    done = launch("guard", "--seconds", "0.5", "--batches", "draw", "-m", "pkg.train", "--", "--lr", "0.3")
    assert done.returncode == 0, done.shown
    assert re.search("pass +overfit", done.stdout), done.shown
    (package / "train.py").write_text(
        patched(LOOP, ("F.cross_entropy(model(x), y)", "F.cross_entropy(model(x[PERM]), y)"))
    )
    done = launch("guard", "--seconds", "0.5", "--batches", "draw", "-m", "pkg.train", "--", "--lr", "0.3")
    assert done.returncode == 3, done.shown
    assert re.search("FAIL +(overfit|signal)", done.stdout), done.shown


def test_watch_runs_the_script_for_real(launch, tmp_path):
    """Its files are written, its steps are in our metrics, a fault is told as advice."""
    source = patched((SCRIPTS / "mnist.py").read_text(), ("    model.eval()\n", ""))
    (tmp_path / "mnist.py").write_text(source)
    done = launch("watch", "mnist.py", "--", "--epochs", "2")
    assert done.returncode == 0, done.shown
    assert (tmp_path / "mnist_cnn.pt").exists()
    out = run_folder(tmp_path, "runs/watch-mnist/*")
    rows = read(out / "step_metrics.jsonl")
    assert len(rows) == 46
    assert {"step", "step/loss", "step/lr"} <= rows[0].keys()
    assert "model.eval() is missing" in done.stderr
    assert "<svg" in (out / "report.html").read_text()
    done = launch("report", str(out))
    assert done.returncode == 0, done.shown


def test_watch_in_code_tells_a_fault_and_leaves_torch_as_it_was():
    """`with trainworthy.watch():` around a loop without zero_grad(); afterwards every patched function is the original."""

    def patched_places() -> tuple:
        return (
            F.cross_entropy,
            nn.Module.__call__,
            DataLoader.__iter__,
            torch.autograd.backward,
            torch.optim.Optimizer.__init__,
        )

    before, said = patched_places(), []
    torch.manual_seed(0)
    x = torch.randn(256, 8)
    with trainworthy.watch(say=said.append) as seen:
        assert patched_places()[0] is not before[0]
        model = nn.Linear(8, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for a, b in DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), 16, shuffle=True):
            F.cross_entropy(model(a), b).backward()
            optimizer.step()
    assert seen.steps == 16
    assert any("zero_grad" in text for text in said), said
    assert patched_places() == before


@pytest.mark.parametrize("name", QUICK_ODD)
def test_guard_odd_script(name, tmp_path):
    """A working guard or one clear message; the user's files are as before."""
    odd(name, tmp_path)


@pytest.mark.verify
@pytest.mark.parametrize("name", [n for n in ODD if n not in QUICK_ODD])
def test_guard_every_odd_script(name, tmp_path):
    """The rest of them."""
    odd(name, tmp_path)


def odd(name: str, folder: Path) -> None:
    source, code, words = ODD[name]
    (folder / "mine.txt").write_text("precious")
    (folder / "other.txt").write_text("other")
    (folder / "folder").mkdir()
    (folder / "folder" / "x").write_text("x")
    try:
        verdicts, output, _ = guard(source, folder, interventions=False, **{"--seconds": "1", "--load-seconds": "60"})
        got = 3 if failed(verdicts) else 0
    except Stop as stop:
        got, output = stop.exit_code, str(stop)
    assert got == code, output
    assert words in output
    assert (folder / "mine.txt").read_text() == "precious"
    assert (folder / "other.txt").exists()
    assert (folder / "folder" / "x").exists()
    assert {p.name for p in folder.iterdir()} <= {"mine.txt", "other.txt", "folder", "train.py", "out"}


@pytest.mark.parametrize("bug", [b for b in BUGS if b.id in QUICK_BUGS], ids=lambda b: b.id)
def test_guard_stops(bug, tmp_path):
    """A handful of real bugs, in a short look."""
    stopped(bug, tmp_path, **{"--seconds": "0.5"})


@pytest.mark.verify
@pytest.mark.parametrize("bug", [b for b in BUGS if b.id not in QUICK_BUGS], ids=lambda b: b.id)
def test_guard_stops_every_bug(bug, tmp_path):
    """The full matrix."""
    stopped(bug, tmp_path)


@pytest.mark.parametrize("name", QUICK_UNSEEN)
def test_guard_stops_unseen(name, tmp_path):
    """Bugs that were written by somebody who had not read the checks."""
    stops_unseen(name, tmp_path)


@pytest.mark.verify
@pytest.mark.parametrize("name", [n for n in UNSEEN if n not in QUICK_UNSEEN])
def test_guard_stops_every_unseen(name, tmp_path):
    """The rest of them."""
    stops_unseen(name, tmp_path)


def stops_unseen(name: str, folder: Path) -> None:
    one = next(p for p in (*unseen.BUGS, *unseen_heldout.BUGS) if p.id == name)
    verdicts, output, _ = guard(patches.patched(one), folder, interventions=False)
    assert failed(verdicts), output
    assert UNSEEN[name] in output


@pytest.mark.verify
@pytest.mark.parametrize("name", outside.NAMED)
def test_guard_stops_every_outside(name, tmp_path):
    """Bugs of another outsider, in scripts of his own."""
    one = next(p for p in (*outside.HALF_A, *outside.HALF_B) if p.id == name)
    verdicts, output, _ = guard(patches.patched(one), tmp_path, interventions=False)
    assert failed(verdicts), output
    assert outside.NAMED[name] in output


@pytest.mark.verify
@pytest.mark.parametrize("name", COMMON)
def test_guard_stops_every_common(name, tmp_path):
    """Bugs of a third outsider."""
    one = next(p for p in common_scripts.BUGS if p.id == name)
    verdicts, output, _ = guard(patches.patched(one), tmp_path, **{"--seconds": "3"})
    assert failed(verdicts), output
    assert COMMON[name] in output


WITH_GATES = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainworthy

torch.manual_seed(0)
x = torch.randn(256, 8)
data = TensorDataset(x, (x[:, 0] > 0).long())

def build():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    return model, torch.optim.AdamW(model.parameters(), 1e-2)

def factory():
    model, optimizer = build()
    return trainworthy.Script(model=model, optimizer=optimizer, train=data, val=data, classes=2,
                              loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
                              metric=lambda model, loader: 0.0)

trainworthy.check(factory)  # the same samples in both splits: raises
model, optimizer = build()
with trainworthy.watch("runs/mine"):
    for epoch in range(3):
        for a, b in DataLoader(data, 32, shuffle=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(a), b).backward()
            optimizer.step()
torch.save(model.state_dict(), "model.pt")
"""


def test_guard_leaves_out_the_gates_and_the_watch_of_a_script_itself(launch, tmp_path):
    """Each rehearsal ran all gates, after which the script's torch.save() wrote into the user's folder; watch() ended it with exit 2."""
    (tmp_path / "train.py").write_text(WITH_GATES)
    done = launch("guard", "train.py", "--no-interventions", "--only", "finite,files", code=0)
    assert "trainworthy.check is left out in rehearsals" in done.stdout, done.shown
    assert "trainworthy.watch is left out in rehearsals" in done.stdout
    assert "1 files written went to a scratch folder" in done.stdout
    assert not (tmp_path / "model.pt").exists()
    assert not (tmp_path / "runs" / "mine").exists()


@pytest.mark.verify
def test_guard_under_torchrun(tmp_path):
    """Rank 0 rehearses both ranks; the verdicts are printed once."""
    (tmp_path / "ddp.py").write_text(broken(next(b for b in BUGS if b.id == "ranks-same-data")))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "-m", "trainworthy.guard"]
    words = ["--no-interventions", "--seconds", "1", "ddp.py"]
    done = subprocess.run(
        [*command, *words], cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 1, done.stderr
    assert done.stdout.count("FAIL   ranks") == 1, done.stdout
    assert "DistributedSampler is missing" in done.stdout


@pytest.mark.parametrize("name", ["gan", "nanogpt"])
def test_guard_is_quiet(name, tmp_path):
    """A handful of healthy scripts."""
    verdicts, output, _ = guard(
        (SCRIPTS / f"{name}.py").read_text(), tmp_path, interventions=False, **{"--seconds": "0.5"}
    )
    assert not failed(verdicts), output


@pytest.mark.verify
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", HEALTHY)
def test_guard_is_quiet_on_every_healthy_script(name, seed, tmp_path):
    """The full matrix, at three seeds."""
    source = re.sub(r"manual_seed\(\d+\)", f"manual_seed({seed})", (SCRIPTS / f"{name}.py").read_text())
    verdicts, output, _ = guard(source, tmp_path, **RANKS.get(name, {}))
    assert not failed(verdicts), output


ENDLESS = """
import torch
from pathlib import Path
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x = torch.randn(256, 8)
data = TensorDataset(x, (x[:, 0] > 0).long())
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
for epoch in range(100000):
    for a, b in DataLoader(data, 32, shuffle=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(a), b).backward()
        optimizer.step()
    Path("notes.txt").write_text(str(epoch))
"""


@pytest.mark.parametrize("how", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.verify)])
def test_a_signal_ends_guard_with_its_rehearsals(how, tmp_path):
    """The rehearsals that ran at the same time went on, and their folder stayed; no word was printed."""
    (tmp_path / "train.py").write_text(ENDLESS)
    (tmp_path / "work").mkdir()
    child = start("guard", "train.py", cwd=tmp_path, TMPDIR=str(tmp_path / "work"))
    wait_until(
        lambda: len(list((tmp_path / "work").glob("tw-*/*/first-step"))) == 3, child=child
    )  # the first, and two at a time
    children = psutil.Process(child.pid).children(recursive=True)
    child.send_signal(how)
    said = child.communicate(timeout=60)[0]
    assert child.returncode == 128 + how, said
    assert f"interrupted: {how.name}\n  next:         trainworthy guard train.py" in said
    assert "Traceback" not in said
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    assert not list((tmp_path / "work").glob("tw-*"))
    assert not (tmp_path / "notes.txt").exists()
