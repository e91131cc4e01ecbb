"""doctor, diff and batch through the real command: what they say, and their exit codes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from core import gates
from tests.commands import environment, trainworthy
from tests.conftest import ROOT, patched


# ---------------------------------------------------------------------------------------------------------------- doctor
def doctor(tmp_path: Path, *, gpus: str = "", processes: str = "", **env: str) -> dict[str, dict]:
    """The facts of `doctor --json` by name, on a machine whose driver tool says `gpus` and `processes`."""
    if gpus:
        tool = tmp_path / "bin" / "nvidia-smi"
        tool.parent.mkdir()
        tool.write_text(f"""#!/bin/sh
case "$1" in
--query-gpu*) echo "{gpus}";;
--query-compute*) echo "{processes}";;
*) echo "Driver Version: 535.1   CUDA Version: 12.2";;
esac
""")
        tool.chmod(0o755)
        env["PATH"] = f"{tool.parent}{os.pathsep}{os.environ['PATH']}"
    done = trainworthy("doctor", "--json", cwd=tmp_path, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    return {fact["name"]: fact for fact in json.loads(done.stdout)["facts"]}


def test_doctor_reads_at_once_and_imports_nothing_heavy(tmp_path: Path):
    done = trainworthy("doctor", cwd=tmp_path, TRAINWORTHY_CACHE="/tmp")
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(len(line) <= 80 for line in done.stdout.splitlines() if "next:" not in line and "/" not in line)
    for words in ("torch ", "vision/classify", "cores", "/dev/shm", "disk: runs", "the core can run"):
        assert words in done.stdout, words
    code = ("import atexit, sys; sys.argv = ['trainworthy', 'doctor']; atexit.register(lambda: print('torch' in sys.modules));"
            "from core.cli import main; main()")  # fmt: skip
    inside = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert inside.stdout.endswith("False\n"), inside.stderr
    assert not list(tmp_path.iterdir())


def test_doctor_says_who_shares_the_accelerator(tmp_path: Path):
    facts = doctor(tmp_path, gpus="GPU-1, H100, 535.1, 80000, 40000\nGPU-2, H100, 535.1, 80000, 3",
                   processes="GPU-1, 4711, 39000, /usr/bin/python3")  # fmt: skip
    assert facts["accelerator 0"]["level"] == "mind"
    assert "4711 python3" in facts["accelerator 0"]["meaning"]
    assert "CUDA_VISIBLE_DEVICES=1" in facts["accelerator 0"]["next"]
    assert facts["accelerator 1"]["level"] == "ok"
    assert facts["visible"]["level"] == "mind", "the tests hide every accelerator"


def test_doctor_says_what_is_missing_and_how_to_get_it(tmp_path: Path):
    """Another torch and an old tyro, as the metadata in a folder in front of the installed ones say."""
    packages = tmp_path / "packages"
    for name, version in (("torch", "2.12.0"), ("tyro", "0.1.0")):
        info = packages / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    path = os.pathsep.join([str(packages), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = trainworthy("doctor", "--json", cwd=tmp_path, PYTHONPATH=path, OMP_NUM_THREADS="4096")
    assert done.returncode == 2, done.stdout + done.stderr
    found = json.loads(done.stdout)
    facts = {fact["name"]: fact for fact in found["facts"]}
    assert found["fit"] is False
    assert (facts["tyro"]["level"], facts["torch"]["level"], facts["threads"]["level"]) == ("missing", "ok", "mind")
    assert "tyro>=0.9 is needed, this is 0.1.0" in facts["tyro"]["meaning"]
    assert "pip install" in facts["tyro"]["next"]
    assert facts["torchvision"]["level"] == "mind"
    assert "torchvision::nms" in facts["torchvision"]["meaning"]


# ------------------------------------------------------------------------------------------------------------------ diff
CHANGES = (
    ("optim=Optim(lr=3e-3,", "optim=Optim(lr=1e-2,"),
    ("label_smoothing: float = 0.1", "label_smoothing: float = 0.05"),
    ("h = F.relu(self.norm1(self.conv1(x)))", "h = F.gelu(self.norm1(self.conv1(x)))"),
    ('truth.append(batch["label"])', 'truth.append(batch["label"].long())'),
    ("        run.update(stage, step.batches)", "        run.update(stage, step.batches[:1])"),
    ("expect=core.Expect(", 'expect=core.Expect(couplings="contrastive", '),
)
"""One hunk in the settings, the model, the evaluation, the loop and the expectations of a recipe."""


def forked(tmp_path: Path, *hunks: tuple[str, str], recipe: str = "vision/classify", name: str = "mine.py") -> Path:
    """A fork by the real command, changed."""
    assert trainworthy("fork", recipe, name, cwd=tmp_path).returncode == 0
    path = tmp_path / name
    path.write_text(patched(path.read_text(), *hunks))
    return path


def sections(shown: str) -> dict[str, str]:
    """{heading: what stands under it} of what diff printed."""
    blocks = [block.partition("\n") for block in shown.split("\n\n")]
    return {head.partition(" (")[0]: body for head, _, body in blocks}


def test_diff_groups_what_changed_and_names_the_gates_that_look_there(tmp_path: Path):
    forked(tmp_path, *CHANGES)
    done = trainworthy("diff", "mine.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = sections(done.stdout)
    assert re.search(r"optim.lr +0.003 -> 0.01 .*optimizers", found["settings"])
    assert re.search(r"label_smoothing +0.1 -> 0.05 .*loss", found["settings"])
    assert "expect.couplings  - -> 'contrastive'" in found["told to the gates"]
    block = next(body for head, body in found.items() if "model" in head)
    assert "Block" in block
    assert "+        h = F.gelu(self.norm1(self.conv1(x)))" in block
    assert "confusion_matrix" in next(body for head, body in found.items() if "evaluate" in head)
    assert "step.batches[:1]" in found["train"]
    gates = found["gates that look at this"]
    for gate, part in (
        ("schedule", "optimizers"),
        ("evaluation", "evaluate"),
        ("accumulation", "train"),
        ("dependency", "expect"),
    ):
        assert re.search(rf"{gate} .*{part}", gates), gate
    assert "leakage" not in gates, "the data did not change"
    only = re.search(r"next +trainworthy check mine.py --only (\S+)", done.stdout)[1].split(",")
    assert only == [line.split()[0] for line in gates.splitlines() if "no gate looks" not in line]


def test_diff_of_one_part_asks_only_the_gates_that_look_there(tmp_path: Path):
    forked(
        tmp_path,
        ("rotation, shift", "turns, shift"),
        ("        12, translate=(0.1, 0.1),", "        20, translate=(0.1, 0.1),"),
    )
    only = re.search(r"--only (\S+)", trainworthy("diff", "mine.py", cwd=tmp_path).stdout)[1].split(",")
    assert {"data", "leakage"} <= set(only)
    assert not {"schedule", "terms", "init"} & set(only)


def test_diff_says_when_nothing_that_runs_changed(tmp_path: Path):
    path = forked(tmp_path)
    assert trainworthy("diff", "mine.py", cwd=tmp_path).stdout.endswith("nothing changed\n")
    path.write_text(patched(path.read_text(), ("    def loss(model", "    # as it was\n    def loss(model")))
    assert "only comments, docstrings or layout changed" in trainworthy("diff", "mine.py", cwd=tmp_path).stdout


@pytest.mark.parametrize("in_git", [True, False])
def test_diff_after_the_recipe_has_changed(tmp_path: Path, in_git: bool):
    parent = forked(tmp_path, name="parent.py")
    if in_git:
        for words in (["init", "-q"], ["add", "parent.py"]):
            subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    forked(tmp_path, CHANGES[0], recipe="parent.py", name="child.py")
    parent.write_text(patched(parent.read_text(), CHANGES[2]))
    done = trainworthy("diff", "child.py", cwd=tmp_path)
    assert "the recipe has changed since this fork was made" in done.stdout, done.stdout + done.stderr
    assert "0.003 -> 0.01" in done.stdout
    assert ("gelu" in done.stdout, "cannot be had" in " ".join(done.stdout.split())) == (not in_git, not in_git)


def test_every_gate_says_what_it_looks_at():
    for gate in gates.ORDER:
        assert gate.reads, gate.id
        assert set(gate.reads) <= set(gates.PARTS), gate.id
    assert gates.gate("new", rows="C0", title="says nothing")(lambda proof: None).reads == gates.PARTS


# ------------------------------------------------------------------------------------------------------------- bad usage
@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("doctor", "--jsn"), "doctor takes no arguments but --json"),
        (("diff", "none.py"), "no recipe file none.py"),
        (("diff", "copied.py"), "copied.py is not a fork"),
        (("diff", "copied.py", "--against", "vision/clasify"), "unknown recipe"),
        (("diff", "broken.py"), "broken.py is not valid Python"),
        (("diff", "vision/classify"), "is a recipe"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, tuple) else "",
)
def test_bad_usage(argv: tuple[str, ...], words: str, tmp_path: Path):
    source = (ROOT / "recipes" / "vision" / "classify.py").read_text()
    (tmp_path / "copied.py").write_text(source)
    (tmp_path / "broken.py").write_text(
        f"{source}\ndef\n# forked from vision/classify, source {'0' * 40}, on 2026-11-21\n"
    )
    done = trainworthy(*argv, cwd=tmp_path)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
    assert words in done.stderr
    assert not list(tmp_path.rglob("args.json"))
