"""Settings as files, results as JSON, and what a run was made of."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.core.test_seeds import group
from tests.helpers.commands import assert_refused, holds, read, run_folder, trainworthy

TINY = ("--train.epochs", "0.05", "--train.batch-size", "16", "--gates.no-enabled", "--run.no-tensorboard")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A finished run of 4 steps (--max-steps) whose settings came from a YAML file."""
    home = tmp_path_factory.mktemp("config")
    made = trainworthy("config", "vision/classify", *TINY, "--optim.clip", "inf", cwd=home, code=0)
    (home / "run.yaml").write_text(made.stdout)
    trainworthy("run", "vision/classify", "--config", "run.yaml", "--max-steps", 4, cwd=home, code=0)
    return run_folder(home)


def test_a_file_of_settings_starts_the_same_run(run: Path):
    """YAML to run and back: what the file says is what args.json says; --max-steps counts on top."""
    written, used = yaml.safe_load((run.parents[2] / "run.yaml").read_text()), read(run / "args.json")["settings"]
    assert written["settings"]["optim"]["clip"] == used["optim"]["clip"] == "inf"
    assert used["train"].pop("max_steps") == 4
    assert written["settings"]["train"].pop("max_steps") == 0
    for one in (written["settings"], used):
        one["train"].pop("precision")  # "launcher" in the file, what it came to in the run
    assert written["settings"] == used
    assert read(run / "summary.json")["steps"] == read(run / "summary.json")["planned_steps"] == 4


def test_a_part_of_the_settings_lies_over_its_preset(tmp_path: Path):
    (tmp_path / "some.yml").write_text("preset: full\nsettings:\n  optim:\n    lr: 2e-3\n")
    full = trainworthy("config", "vision/classify", "--preset", "full", "--json", cwd=tmp_path)
    both = trainworthy("config", "vision/classify", "--config", "some.yml", "--json", cwd=tmp_path)
    expected = json.loads(full.stdout)
    expected["settings"]["optim"]["lr"] = 2e-3
    assert json.loads(both.stdout) == expected
    changed = trainworthy("config", "vision/classify", "--config", "some.yml", "--changed", cwd=tmp_path)
    assert yaml.safe_load(changed.stdout)["settings"] == {"optim": {"lr": 2e-3}}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("optim: {lr: [", "cannot read the settings in bad.yaml"),
        ("- 1\n- 2\n", "a YAML mapping"),
        ("settings: 3\n", "a YAML mapping"),
        ("optim: {lrr: 1}\n", "unknown setting optim.lrr"),
        ("optim: {lr: fast}\n", "wrong type"),
        ("!!python/object/apply:os.system ['touch gone']\n", "cannot read the settings in bad.yaml"),
        ("recipe: llm/sft\nsettings: {optim: {lr: 0.1}}\n", "holds the settings of another recipe"),
        ("train: {max_steps: -1}\n", "--train.max-steps must not be negative"),
    ],
)
def test_bad_files_get_one_message(text: str, words: str, tmp_path: Path):
    (tmp_path / "bad.yaml").write_text(text)
    assert_refused(trainworthy("run", "vision/classify", "--config", "bad.yaml", cwd=tmp_path), words)
    assert not (tmp_path / "gone").exists()


def test_results_as_json(run: Path, tmp_path: Path):
    listed = json.loads(trainworthy("list", "--json", cwd=tmp_path).stdout)
    assert "vision/classify" in [e["id"] for e in listed]
    told = json.loads(trainworthy("report", run, "--json", cwd=tmp_path).stdout)
    assert (told["metric"], told["finished"], told["gates_enabled"]) == ("accuracy", True, False)
    assert told["value"] == read(run / "summary.json")["reported"]["accuracy"]
    group(tmp_path / "a", [0.9, 0.91])
    group(tmp_path / "b", [0.95, 0.96])
    both = json.loads(trainworthy("compare", "a", "b", "--json", cwd=tmp_path).stdout)
    assert both["difference"]["value"] == pytest.approx(0.05)
    assert both["difference"]["real"] is True


# ---------------------------------------------------------------------------------------------------------------- repro
def test_repro_finds_nothing_where_nothing_changed_and_starts_the_same_run(run: Path):
    home = run.parents[2]
    done = trainworthy("repro", run, "--json", cwd=home, code=0)
    found = json.loads(done.stdout)
    rows = {c["what"]: c for c in found["compared"]}
    assert {"versions", "machine", "sources", "settings", "data"} <= rows.keys()
    assert not [line for c in rows.values() for line in c["differs"]], found
    other = trainworthy(
        "repro", run, "--json", cwd=home, OMP_NUM_THREADS="3"
    )  # the run sets its threads by itself: no difference
    machine = next(c for c in json.loads(other.stdout)["compared"] if c["what"] == "machine")
    assert machine["differs"] == []
    trainworthy(*found["command"].split()[1:], "--run.out", home / "again", cwd=home, code=0)
    second = run_folder(home, "again/*/2*")
    assert read(second / "summary.json")["metrics"] == read(run / "summary.json")["metrics"]


def test_repro_says_what_differs(run: Path, tmp_path: Path):
    other = tmp_path / "other"
    shutil.copytree(run, other)
    environment, data = read(other / "environment.json"), read(other / "data.json")
    environment["versions"]["torch"] = "1.0"
    environment["commit"], environment["diff"] = "0" * 40, "diff --git a/core/x.py b/core/x.py\n+1"
    environment["sources"][str(tmp_path / "gone.py")] = "00"
    data["identity"]["none"]["train"]["content"] = "another"
    (other / "environment.json").write_text(json.dumps(environment))
    (other / "data.json").write_text(json.dumps(data))
    done = trainworthy("repro", other, cwd=tmp_path, code=0)
    holds(done.stdout, "instead of 1.0", "gone.py: not there", "train: other inputs", "versions, ", "torch==1.0")
    assert trainworthy("repro", other, "--diff", cwd=tmp_path).stdout.startswith("diff --git")


def test_repro_of_a_run_that_was_killed_early_says_what_is_missing(run: Path, tmp_path: Path):
    (tmp_path / "early").mkdir()
    shutil.copy(run / "args.json", tmp_path / "early")
    (tmp_path / "early" / "environment.json").write_text('{"versions": {"tor')
    done = trainworthy("repro", "early", cwd=tmp_path, code=0)
    holds(done.stdout, "environment.json is missing or cut off", "data.json is missing")


# ------------------------------------------------------------------------------------------------------- list --running
def test_live_runs_are_listed_with_step_speed_and_time_left(tmp_path: Path):
    """A folder whose lock a process holds is live; one that has ended, or is half written, is none or says less."""
    for name in ("live", "ended", "early"):
        home = tmp_path / "runs" / "x" / name
        home.mkdir(parents=True)
        (home / ".lock").touch()
        train = {"epochs": 2.0, "batch_size": 10, "max_steps": 0}
        (home / "args.json").write_text(json.dumps({"recipe": "x", "argv": ["x"], "settings": {"train": train}}))
    (tmp_path / "runs" / "x" / "early" / "args.json").write_text('{"recipe": "x", "sett')
    home = tmp_path / "runs" / "x" / "live"
    (home / "data.json").write_text(json.dumps({"splits": {"train": {"samples": 100}}}))
    (home / "gates.json").write_text(json.dumps({"enabled": True, "gates": [{"id": "overfit", "verdict": "pass"}]}))
    rows = [{"step": n, "step/loss": 1.0, "step/samples_per_sec": 50.0} for n in range(1, 6)]
    (home / "step_metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows) + '{"step": 6, "st')
    hold = (
        "import fcntl, sys; f = [open(p, 'a') for p in sys.argv[1:]]; [fcntl.lockf(x, fcntl.LOCK_EX) for x in f]; "
        "print('held', flush=True); sys.stdin.read()"
    )
    locks = [str(tmp_path / "runs" / "x" / name / ".lock") for name in ("live", "early")]
    holder = subprocess.Popen(
        [sys.executable, "-c", hold, *locks], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline().strip() == "held"
        done = trainworthy("list", "--running", "--json", cwd=tmp_path, code=0)
        early, running = json.loads(done.stdout)
        assert (early["step"], early["seconds_left"], early["gates"]) == (0, None, "at its gates")
        assert (running["step"], running["steps"], running["gates"]) == (5, 20, "1 passed")
        assert running["seconds_left"] == pytest.approx(15 * 10 / 50)
        assert "5 of 20" in trainworthy("list", "--running", cwd=tmp_path).stdout
    finally:
        holder.communicate("")
    assert "is running" in trainworthy("list", "--running", cwd=tmp_path).stdout
    trainworthy("list", "--running", "none", cwd=tmp_path, code=2)
