"""--track: the same tags reach a tracker through Accelerate; one that is missing, unknown or failing is told."""

import json
import os
from pathlib import Path

import pytest

from tests.helpers.commands import QUICK, assert_refused, read, run_folder, trainworthy

# Stands for the package: Accelerate imports it by name. The real ones were tried by hand (LOG.md).
TRACKIO = """
import json

class config:
    kept = {{}}

    def update(values, allow_val_change):
        config.kept = values

def write(row):
    with open("tracked.jsonl", "a") as file:
        file.write(json.dumps(row) + "\\n")

class Run:
    def log(self, values, step):
        {log}
        write({{"step": step, **values}})

    def finish(self):
        write({{"finished": config.kept}})

def init(**how):
    {init}
    write(how)
    return Run()

def finish():
    pass
"""


def package(folder: Path, *, log: str = "pass", init: str = "pass") -> dict[str, str]:
    """A folder with a package called trackio; the environment in which it is found."""
    home = folder / "packages"
    about = "Metadata-Version: 2.1\nName: trackio\nVersion: 0.1\n"
    for path, text in (
        ("trackio/__init__.py", TRACKIO.format(log=log, init=init)),
        ("trackio-0.1.dist-info/METADATA", about),
    ):
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        (home / path).write_text(text)
    return {"PYTHONPATH": os.pathsep.join([str(home), os.environ.get("PYTHONPATH", "")])}


def test_the_same_tags_and_settings_arrive(tmp_path: Path):
    env = package(tmp_path)
    trainworthy("run", "vision/classify", *QUICK, "--track", "trackio", cwd=tmp_path, **env, code=0)
    folder = run_folder(tmp_path)
    start, *rows, end = read(tmp_path / "tracked.jsonl")
    assert start == {"project": "vision-classify", "name": folder.name}
    ours = read(folder / "step_metrics.jsonl") + read(folder / "epoch_metrics.jsonl")
    assert sorted(rows, key=json.dumps) == sorted(ours, key=json.dumps)
    assert [r["step"] for r in rows] == sorted(r["step"] for r in rows)
    assert end["finished"]["train.batch_size"] == 64


def test_a_tracker_that_fails_does_not_stop_the_run(tmp_path: Path):
    env = package(tmp_path, log='raise ConnectionError("gone")')
    done = trainworthy("run", "vision/classify", *QUICK, "--track", "trackio", cwd=tmp_path, **env, code=0)
    assert done.stdout.count("ConnectionError: gone") == 1
    assert len(read(run_folder(tmp_path) / "step_metrics.jsonl")) == 20


@pytest.mark.parametrize(
    ("asked", "words"),
    [("wadnb", "one of: mlflow, trackio, wandb"), ("trackio", "no key"), ("wandb", "pip install wandb")],
)
def test_told_before_anything_is_spent(asked: str, words: str, tmp_path: Path):
    env = package(tmp_path, init='raise RuntimeError("no key")')
    assert_refused(trainworthy("run", "vision/classify", *QUICK, "--track", asked, cwd=tmp_path, **env), words)
