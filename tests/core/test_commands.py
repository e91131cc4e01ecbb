"""doctor, diff and batch through the real command: what they say, and their exit codes."""

import json
import math
import os
import re
import subprocess
from pathlib import Path

import pytest
from trainworthy.core import gates
from trainworthy.core.commands.batch import Measured, Trial
from trainworthy.core.gates import order

from tests.conftest import Done, Hunk, patched
from tests.helpers.commands import holds, imported, installed, read, trainworthy
from tests.vision.planted_classify import STAGES, staged


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
    done = installed("doctor", "--json", cwd=tmp_path, **env, code=0)
    return {fact["name"]: fact for fact in json.loads(done.stdout)["facts"]}


def test_doctor_reads_at_once_and_imports_nothing_heavy(tmp_path: Path):
    done = installed("doctor", cwd=tmp_path, TRAINWORTHY_CACHE="/tmp", code=0)
    assert all(len(line) <= 80 for line in done.stdout.splitlines() if "next:" not in line and "/" not in line)
    holds(done.stdout, "torch ", "vision/classify", "cores", "/dev/shm", "disk: runs", "the core can run")
    assert "torch" not in imported("doctor", cwd=tmp_path)[1]
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
    done = installed("doctor", "--json", cwd=tmp_path, PYTHONPATH=path, OMP_NUM_THREADS="4096", code=2)
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
    ("expect = core.Expect(", 'expect = core.Expect(batch_dependence="contrastive", '),
)
"""One hunk in the settings, the model, the evaluation, the loop and the expectations of a recipe."""


def forked(tmp_path: Path, *hunks: tuple[str, str], recipe: str = "vision/classify", name: str = "mine.py") -> Path:
    """A fork by the real command, changed."""
    trainworthy("fork", recipe, name, cwd=tmp_path, code=0)
    path = tmp_path / name
    path.write_text(patched(path.read_text(), *hunks))
    return path


def sections(shown: str) -> dict[str, str]:
    """{heading: what stands under it} of what diff printed."""
    blocks = [block.partition("\n") for block in shown.split("\n\n")]
    return {head.partition(" (")[0]: body for head, _, body in blocks}


def test_diff_groups_what_changed_and_names_the_gates_that_look_there(tmp_path: Path):
    forked(tmp_path, *CHANGES)
    done = trainworthy("diff", "mine.py", cwd=tmp_path, code=0)
    found = sections(done.stdout)
    assert re.search(r"optim.lr +0.003 -> 0.01 .*optimizers", found["settings"])
    assert re.search(r"label_smoothing +0.1 -> 0.05 .*loss", found["settings"])
    assert "expect.batch_dependence  - -> 'contrastive'" in found["told to the gates"]
    assert "Block" in found["model"]
    assert "+        h = F.gelu(self.norm1(self.conv1(x)))" in found["model"]
    assert "confusion_matrix" in next(body for head, body in found.items() if "evaluate" in head)
    assert "step.batches[:1]" in found["train"]
    for gate, part in (
        ("schedule", "optimizers"),
        ("evaluation", "evaluate"),
        ("accumulation", "train"),
        ("dependency", "expect"),
    ):
        assert re.search(rf"{gate} .*{part}", found["gates that look at this"]), gate


@pytest.mark.parametrize(
    ("hunk", "part", "asked", "not_asked"),
    [
        (
            ("learn, held_out = digits.split(labels)", "held_out, learn = digits.split(labels)"),
            "data",
            {"data", "leakage"},
            set(),
        ),
        (CHANGES[4], "train", {"wiring", "accumulation", "resume"}, {"data", "leakage", "terms", "initial-loss"}),
        (CHANGES[3], "evaluate, confusion", {"evaluation", "schema"}, {"data", "leakage", "schedule", "wiring"}),
    ],
    ids=("data", "loop", "evaluation"),
)
def test_diff_of_one_part_asks_the_gates_that_look_there(
    hunk: Hunk, part: str, asked: set, not_asked: set, tmp_path: Path
):
    forked(tmp_path, hunk)
    done = trainworthy("diff", "mine.py", cwd=tmp_path)
    assert hunk[1].strip() in sections(done.stdout)[part]
    listed = sections(done.stdout)["gates that look at this"].splitlines()
    named = [line.split()[0] for line in listed if "no gate looks" not in line]
    assert asked <= set(named)
    assert not set(named) & not_asked
    only = f" --only {','.join(named)}" if order.OWN in named else ""
    assert done.stdout.endswith(f"next   trainworthy check mine.py{only}\n")


def test_the_next_command_of_diff_runs_the_gates_that_only_this_recipe_has(tmp_path: Path):
    """A ratio that is 1 everywhere is seen by `formula` and `entries` alone, which `diff` cannot name: no stage is built."""
    before = '(policy.head.log_prob(outputs, batch["action"]) - batch["log_prob"]).exp()'
    after = "(new := policy.head.log_prob(outputs, batch['action'])).sub(new.detach()).exp()"
    forked(tmp_path, (before, after), recipe="rl/ppo")
    command = trainworthy("diff", "mine.py", cwd=tmp_path, code=0).stdout.split("next   trainworthy ")[1].split()
    assert command[-1].endswith(f",{order.OWN}")
    done = trainworthy(*command, cwd=tmp_path, code=3)
    assert re.search(r"FAIL +formula", done.stdout)
    assert re.search(r"FAIL +entries", done.stdout)
    assert not re.search(r"(pass|skip|FAIL) +(data|leakage) ", done.stdout), "gates that were not named"


def test_own_is_no_gate_that_can_be_waived(tmp_path: Path):
    forked(tmp_path)
    done = trainworthy("check", "mine.py", "--gates.waive", "own", "--gates.because", "x", cwd=tmp_path, code=2)
    assert "unknown gate 'own'" in done.stdout + done.stderr


def test_diff_says_when_nothing_that_runs_changed(tmp_path: Path):
    path = forked(tmp_path)
    assert trainworthy("diff", "mine.py", cwd=tmp_path).stdout.endswith("nothing changed\n")
    path.write_text(patched(path.read_text(), ("    def loss(model", "    # as it was\n    def loss(model")))
    assert "only comments, docstrings or layout changed" in trainworthy("diff", "mine.py", cwd=tmp_path).stdout


def test_diff_reads_settings_that_are_unpacked(tmp_path: Path):
    forked(tmp_path, ("        counts=balanced.counts,\n", '        **{"counts": balanced.counts},\n'))
    done = trainworthy("diff", "mine.py", cwd=tmp_path, code=0)
    assert "balanced.counts" in done.stdout


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
    assert ("gelu" in done.stdout, "not available" in " ".join(done.stdout.split())) == (not in_git, not in_git)


def test_every_gate_says_what_it_looks_at():
    for gate in order.ORDER:
        assert gate.reads, gate.id
        assert set(gate.reads) <= set(gates.PARTS), gate.id
    assert gates.gate("new", rows="C0", title="says nothing")(lambda context: None).reads == gates.PARTS


# ----------------------------------------------------------------------------------------------------------------- batch
OUT_OF_MEMORY = """shown = stage.loss
def loss(model, batch):
    if len(batch["label"]) > 40:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
    return shown(model, batch)
stage.loss = loss"""


def test_batch_measures_and_keeps_the_global_batch(launch):
    done: Done = launch("batch", "vision/classify", "--largest", "24", "--no-augment", code=0)
    folder = done.folder()
    found = read(folder / "plots" / "batch_classify.json")
    trials = found["trials"]
    assert [t["size"] for t in trials] == [1, 2, 4, 8, 16, 24]
    best = max(t["samples_per_sec"] for t in trials)
    assert found["knee"] == min(t["size"] for t in trials if t["samples_per_sec"] >= 0.9 * best)
    assert found["largest"] == 24
    assert found["accumulate"] >= 3, "64 samples do not go into micro-batches of 24"
    assert (folder / "plots" / "batch_classify.png").read_bytes().startswith(b"\x89PNG")
    assert done.stdout.count("█") > 6
    assert re.search(rf"next +trainworthy run vision/classify .*--train.accumulate {found['accumulate']}", done.stdout)
    assert "trainworthy lr vision/classify" in done.stdout
    assert {p.name for p in folder.iterdir()} <= {"args.json", "environment.json", "recipe.py", "plots", ".lock"}


def test_batch_finds_where_the_device_runs_out_of_memory(launch, fork):
    fork((STAGES, staged(OUT_OF_MEMORY)))
    done = launch("batch", "mine.py", "--no-augment", code=0)
    found = read(done.folder() / "plots" / "batch_classify.json")
    assert 36 < found["largest"] <= 40, "within a tenth of what fits"
    assert math.ceil(64 / found["accumulate"]) <= 36, "a tenth of what fits is left"
    assert "64 run out of the device's memory" in done.stdout
    nothing = launch("batch", fork((STAGES, staged(OUT_OF_MEMORY.replace("> 40", "> 0"))), name="none.py").name)
    assert (nothing.returncode, "not even one sample fits" in nothing.stderr) == (2, True), nothing.shown


def test_batch_leaves_the_memory_of_the_machine_alone(launch):
    done = launch("batch", "vision/classify", "--memory", "0.0001", "--no-augment", code=0)  # 0.01%: a few megabytes
    assert re.search(r"largest +\d+: \d+ could take more than 0.01% of the [\d.]+ GiB of main memory", done.stdout), (
        done.shown
    )


def test_the_cut_of_a_global_batch():
    """A device that takes 10 ms for up to 32 samples, and as much again for every 32 more, has its knee at 32."""
    trials = [Trial(2**i, 0.01 * max(1, 2**i / 32), memory=0) for i in range(9)]
    found = Measured(trials, ended="", short=False)
    assert (found.knee.size, found.largest) == (32, 256)
    assert found.cut(256)[0] == 1
    assert found.cut(1000)[0] == 4
    assert Measured(trials, ended="", short=True).cut(256)[0] == 2, "a tenth of the memory stays free"
    assert found.rate(48) == pytest.approx(3200)


@pytest.mark.parametrize("lazily", [False, True], ids=("at the top", "inside a function"))
def test_a_fork_that_was_moved_without_its_helper_module_is_one_message(lazily: bool, tmp_path: Path):
    place = "    def loss(model" if lazily else "from trainworthy import core\n"
    forked(tmp_path, (place, f"    import beside\n\n{place}" if lazily else f"{place}import beside\n"))
    done = trainworthy("check", "mine.py", "--only", "schema", cwd=tmp_path, code=2)
    text = done.stdout + done.stderr
    assert "Traceback" not in text
    assert f"put beside.py into {tmp_path}" in text
