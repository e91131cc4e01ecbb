"""`trainworthy guard` follows a script to its end: what goes wrong there is stopped, healthy ends are quiet."""

import re
from pathlib import Path

import pytest

from tests.conftest import patched
from tests.guard import common_scripts
from tests.guard.guarding import SCRIPTS, guard
from tests.helpers import patches
from tests.helpers.sampling import sample

SCRIPT = """
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x, y = load_digits(return_X_y=True)
x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
order = torch.randperm(len(x))
x, y = x[order], y[order]
train, val, test = (TensorDataset(x[i:j], y[i:j]) for i, j in ((0, 1100), (1100, 1400), (1400, 1797)))
loader = DataLoader(train, 32, shuffle=True)


def build():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 10))


def evaluate(model, data):
    right = loss = 0
    with torch.no_grad():
        for a, b in DataLoader(data, 50):
            out = model(a)
            loss += F.cross_entropy(out, b, reduction="sum").item()
            right += int((out.argmax(1) == b).sum())
    return right / len(data), loss / len(data)


def epoch(model, optimizer, teacher=None):
    model.train()
    for a, b in loader:
        optimizer.zero_grad()
        out = model(a)
        loss = F.cross_entropy(out, b)
        if teacher is not None:
            with torch.no_grad():
                soft = teacher(a).softmax(1)
            loss = loss + F.kl_div(out.log_softmax(1), soft, reduction="batchmean")
        loss.backward()
        optimizer.step()


model = build()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
best = 0
for _ in range(40):
    epoch(model, optimizer)
    model.eval()
    accuracy, loss = evaluate(model, val)
    if accuracy > best:
        best = accuracy
        torch.save(model.state_dict(), "net.pt")

final = build()
final.load_state_dict(torch.load("net.pt"))
final.eval()
print("test", evaluate(final, test))

student = build()
optimizer = torch.optim.Adam(student.parameters(), lr=1e-3)
for _ in range(5):
    epoch(student, optimizer, final)
student.eval()
print("student", evaluate(student, test))
"""
BUGS = {
    "other-scale": ((" / 16, torch.tensor(y)", ", torch.tensor(y)"),
                    ("loader = DataLoader(train", "for one in (train, val):\n    one.tensors[0].div_(16)\nloader = DataLoader(train")),
    "other-samples": (("loader = DataLoader(train", "for one in (train, test):\n    one.tensors[0].sub_(one.tensors[0].mean(1, keepdim=True))\n"
                       "loader = DataLoader(train"), ("final, test))", "final, val))"), ("student, test))", "student, val))")),
    # The variable's name does not say which way is better: `names` reads that
    "worst-kept": (("accuracy, loss = evaluate", "result, loss = evaluate"), ("accuracy > best", "result < best"),
                   ("best = accuracy", "best = result"), ("best = 0\n", "best = 1\n")),
    "not-loaded": (('final.load_state_dict(torch.load("net.pt"))\n', ""),),
    "dropout-in-test": (("final.eval()\n", ""),),
    "optimiser-of-the-teacher": (("optimizer = torch.optim.Adam(student.parameters(), lr=1e-3)\n", ""),),
}  # fmt: skip
WORDS = {
    "other-scale": "scaled or normalised differently",
    "other-samples": "each by its own values",
    "worst-kept": "the wrong direction",
    "not-loaded": "load_state_dict() is missing",
    "dropout-in-test": "model.eval() is missing before this evaluation",
    "optimiser-of-the-teacher": "the optimiser of the one before",
}
COMMON = {
    "keras_trainer--best_mode": "the wrong direction",
    "keras_trainer--test_scale": "scaled or normalised differently",
    "kfold_tabular--optimizer_once": "the optimiser of the one before",
    "sentiment--vocab_again": "another vocabulary",
}
"""Bugs of a fourth set, half A, that a rehearsal without the script's end misses -> words of their cause."""


def blocking(verdicts: dict) -> list[str]:
    """Ids of the checks that failed."""
    return [v.id for v in verdicts.values() if v.blocks]


def test_guard_command_follows_a_script_to_its_end(launch, tmp_path):
    """A wrong direction of "best" is stopped with its cause, by no other check; the script's file is not in the folder."""
    (tmp_path / "train.py").write_text(patched(SCRIPT, *BUGS["worst-kept"]))
    done = launch("guard", "train.py", "--seconds", "1")
    assert done.returncode == 3, done.shown
    assert re.findall(r"FAIL +(\S+)", done.stdout) == ["ending"], done.shown
    assert WORDS["worst-kept"] in done.stdout
    assert not (tmp_path / "net.pt").exists()


def test_a_script_that_does_not_end_in_time_skips(tmp_path):
    """More epochs than there is time for."""
    source = patched(SCRIPT, ("for _ in range(40):", "for _ in range(10**6):"))
    verdicts, output, _ = guard(source, tmp_path, **{"--seconds": "0.5", "--only": "ending"})
    assert "did not reach its end" in verdicts["ending"].reason, output


def test_a_healthy_end_is_quiet(tmp_path):
    """A model is loaded, tested, and teaches another one."""
    verdicts, output, _ = guard(SCRIPT, tmp_path, **{"--seconds": "1", "--only": "ending"})
    assert verdicts["ending"].verdict == "pass", output
    assert "states loaded: 1" in output


@pytest.mark.verify
@pytest.mark.parametrize("name", BUGS)
def test_guard_stops_what_comes_late(name, tmp_path):
    """Only this check sees it."""
    verdicts, output, _ = guard(patched(SCRIPT, *BUGS[name]), tmp_path, **{"--seconds": "1"})
    assert blocking(verdicts) == ["ending"], output
    assert WORDS[name] in output


@pytest.mark.parametrize("name", sample(COMMON, "keras_trainer--test_scale"))
def test_guard_stops_common_ends(name, tmp_path):
    """Bugs by somebody who had not read the checks."""
    one = next(p for p in common_scripts.BUGS if p.id == name)
    verdicts, output, _ = guard(patches.patched(one), tmp_path, **{"--seconds": "5"})
    assert blocking(verdicts) == ["ending"], output
    assert COMMON[name] in output


@pytest.mark.verify
@pytest.mark.parametrize("name", ["sentiment", "kfold_tabular"])
def test_healthy_ends_are_quiet(name: str, tmp_path: Path):
    """Best weights are loaded and evaluated on a test set; models and optimisers follow each other."""
    source = (SCRIPTS / f"{name}.py").read_text()
    verdicts, output, _ = guard(source, tmp_path, **{"--seconds": "3", "--only": "ending"})
    assert verdicts["ending"].verdict == "pass", output
