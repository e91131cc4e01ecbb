"""`--json` of commands that print a result: the JSON alone on stdout, everything else on stderr, also if a gate fails."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.commands import read, run_folder, trainworthy

TINY = ("--train.batch-size", "16", "--run.no-tensorboard")
SCRIPT = """\
import torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x = torch.randn(256, 8)
data = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=32, shuffle=True)
net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
adam = torch.optim.Adam(net.parameters(), lr=1e-2)
for epoch in range(3):
    for a, b in data:
        ZERO
        torch.nn.functional.cross_entropy(net(a), b).backward()
        adam.step()
"""


def said(*words: object, cwd: Path, code: int = 0) -> Any:
    done = trainworthy(*words, "--json", cwd=cwd)
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_run_and_resume(tmp_path: Path):
    found = said(
        "run",
        "vision/classify",
        *TINY,
        "--max-steps",
        "2",
        "--gates.no-enabled",
        "--on-end",
        "echo ended",
        cwd=tmp_path,
    )
    folder = run_folder(tmp_path)
    assert found["run"] == str(folder.relative_to(tmp_path))
    assert found["value"] == read(folder / "summary.json")["reported"]["accuracy"]
    assert found["cost"]["device_hours"] > 0
    refused = trainworthy("resume", folder, "--json", cwd=tmp_path)
    assert (refused.returncode, refused.stdout) == (2, "")


def test_check_that_passes_and_that_fails(tmp_path: Path):
    words = ("check", "vision/classify", *TINY, "--only", "overfit,schema")
    found = said(*words, cwd=tmp_path)
    assert (found["passed"], [v["verdict"] for v in found["gates"]]) == (True, ["pass", "pass"])
    assert (tmp_path / found["page"]).is_file()
    found = said(*words, "--optim.lr", "1e-9", cwd=tmp_path, code=3)
    assert (found["passed"], {v["id"]: v["verdict"] for v in found["gates"]}) == (
        False,
        {"schema": "pass", "overfit": "fail"},
    )
    wrong = trainworthy("check", "vision/classify", "--optim.lrr", "1", "--json", cwd=tmp_path)
    assert (wrong.returncode, wrong.stdout) == (2, "")


def test_rates_and_sizes(tmp_path: Path):
    (row, *_) = said("lr", "vision/classify", *TINY, "--steps", "20", cwd=tmp_path)["stages"]
    assert (row["setting"], row["tested"], row["configured"]) == ("optim.lr", True, 3e-3)
    assert (tmp_path / row["plot"]).is_file()
    found = said("batch", "vision/classify", *TINY, "--largest", "2", cwd=tmp_path)
    assert [t["size"] for t in found["trials"]] == [1, 2]
    assert found["next"].startswith("trainworthy run vision/classify")


def test_diff(tmp_path: Path):
    trainworthy("fork", "vision/classify", "mine.py", cwd=tmp_path, code=0)
    assert said("diff", "mine.py", cwd=tmp_path) == {"fork": "mine.py", "against": "vision/classify", "changed": False}
    path = tmp_path / "mine.py"
    path.write_text(path.read_text().replace("label_smoothing: float = 0.1", "label_smoothing: float = 0.05"))
    found = said("diff", "mine.py", cwd=tmp_path)
    assert [(s["name"], s["before"], s["now"]) for s in found["settings"]] == [("label_smoothing", "0.1", "0.05")]
    assert "loss" in next(iter(found["gates"].values()))
    assert found["next"].startswith("trainworthy check mine.py --only ")


@pytest.mark.parametrize(("zero", "code"), [("adam.zero_grad()", 0), ("pass", 3)])
def test_guard(zero: str, code: int, tmp_path: Path):
    (tmp_path / "train.py").write_text(SCRIPT.replace("ZERO", zero))
    found = said("guard", "train.py", "--only", "gradients", "--seconds", "1", cwd=tmp_path, code=code)
    assert found["passed"] is (code == 0)
    assert any(v["id"] == "gradients" for v in found["gates"])


@pytest.mark.verify
def test_bugs(tmp_path: Path):
    found = said("bugs", "vision/classify", "--kind", "planted", "--sample", "1", "--jobs", "1", cwd=tmp_path)
    assert found["caught"]["of"] == 1
