"""The data are known by all of their content, a run by its checkpoints: what a passed gate and a `resume` may rely on."""

import hashlib
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from trainworthy.core.data import contents, inventory
from trainworthy.core.loop import checkpoint
from trainworthy.core.recipe.stage import Data, Field

from tests.conftest import ROOT, Done, patched
from tests.helpers.commands import QUICK, assert_refused, holds, read, run_folder, start, trainworthy
from tests.helpers.pictures import write_folder

# A fork whose data change with a file in the working directory, and whose loop imports its neighbour late.
SPLIT = "    learn, held_out = digits.split(labels)\n"
CHANGED = (
    SPLIT
    + """\
    how = Path("changed").read_text() if Path("changed").exists() else ""
    if how == "copies":  # those that 512 samples, evenly spread, leave out
        seen = {i * 1000 // 512 for i in range(512)}
        images = images.clone()
        images[[held_out[i] for i in range(1000) if i not in seen]] = images[learn[:488]]
    if how == "inputs":
        images = images.clone()
        images[held_out] = images[held_out].flip(0)
    if how == "labels":
        labels = labels.clone()
        labels[held_out] = labels[held_out].flip(0)
"""
)
MODEL = "    model = ResNet(mean, std, cfg.widths, len(classes))\n"
PRETRAINED = (
    MODEL
    + """\
    if Path("weights.pt").exists():  # a pretrained model that may change under the same name
        model.stem.weight.data = torch.load("weights.pt")
    import os
    model.stem.weight.data *= float(os.environ.get("SCALE_OF_MINE", "1"))
"""
)
LOOP = "    for step in run.steps(stage):\n"
LATE = "    import neighbour_of_mine\n\n" + LOOP


def write_fork(folder: Path) -> Path:
    (folder / "neighbour_of_mine.py").write_text("SEEN = True\n")
    path = folder / "mine.py"
    path.write_text(
        patched((ROOT / "recipes/vision/classify.py").read_text(), (SPLIT, CHANGED), (LOOP, LATE), (MODEL, PRETRAINED))
    )
    return path


def hashes(folder: Path) -> dict[str, str]:
    """Every file of a run."""
    found = {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file() and not p.is_symlink()}
    return {str(p.relative_to(folder)): hashlib.sha256(data).hexdigest() for p, data in found.items()}


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder as an interrupted run leaves it, with three checkpoints that were asked for by steps."""
    cwd = tmp_path_factory.mktemp("unfinished")
    write_fork(cwd)
    trainworthy("run", "mine.py", *QUICK, "--run.save-steps", 8, "--run.keep-checkpoints", 9, cwd=cwd, code=0)
    folder = run_folder(cwd)
    (folder / "summary.json").unlink()
    return folder


@pytest.fixture
def copy(unfinished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(unfinished, tmp_path / "copy", symlinks=True))


def refused(launch: Callable[..., Done], folder: Path, *words: str, argv: tuple[str, ...] = (), **env: str) -> Done:
    """Resume is refused with these words, and changes nothing."""
    before = hashes(folder)
    done = launch("resume", str(folder), *argv, **env, code=2)
    holds(done.stderr, *words)
    after = hashes(folder)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert not {name for name in changed if name not in (".lock", "report.html") and not name.startswith("plots/")}, (
        changed
    )
    return done


# ------------------------------------------------------------------------------------------------------ remembered passes
PROVED = [a for a in QUICK if a != "--gates.no-enabled"]


def test_remembered_passes_cover_all_data(tmp_path: Path):
    write_fork(tmp_path)
    quick, cache = PROVED, {"TRAINWORTHY_CACHE": str(tmp_path / "cache")}
    first = trainworthy("run", "mine.py", *quick, cwd=tmp_path, **cache)
    assert "gates passed" in first.stdout, first.stderr
    again = trainworthy("run", "mine.py", *quick, cwd=tmp_path, **cache)
    assert "verdicts are remembered" in again.stdout, again.stderr
    assert "gates passed" not in again.stdout
    folder = max((tmp_path / "runs" / "mine").glob("2*"))
    # as if it had been stopped: its args.json has 5.0 for a preset's 5, and fp32 for `launcher`
    (folder / "summary.json").unlink()
    resumed = trainworthy("resume", folder, cwd=tmp_path, **cache)
    assert resumed.returncode == 0, resumed.stderr
    assert "verdicts are remembered" in resumed.stdout
    (tmp_path / "changed").write_text("copies")
    waived = ("--gates.waive", "data", "--gates.because", "leakage alone")
    leaked = trainworthy("run", "mine.py", *quick, *waived, cwd=tmp_path, **cache, code=3)
    assert "488 exact" in leaked.stdout


@pytest.mark.verify
def test_remembered_passes_cover_weights_and_late_imports(tmp_path: Path):
    fork = write_fork(tmp_path)
    quick, cache = PROVED, {"TRAINWORTHY_CACHE": str(tmp_path / "cache")}
    first = trainworthy("run", "mine.py", *quick, cwd=tmp_path, **cache)
    assert "gates passed" in first.stdout, first.stderr
    torch.save(torch.full((16, 1, 5, 5), torch.nan), tmp_path / "weights.pt")
    damaged = trainworthy("run", "mine.py", *quick, cwd=tmp_path, **cache, code=3)
    assert "verdicts are remembered" not in damaged.stdout
    (tmp_path / "weights.pt").unlink()
    fork.with_name("neighbour_of_mine.py").write_text("raise RuntimeError('another version')\n")
    other = trainworthy("run", "mine.py", *quick, cwd=tmp_path, **cache, code=3)
    assert "verdicts are remembered" not in other.stdout


# ---------------------------------------------------------------------------------------------------------------- resume
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("inputs", "val: other inputs (1,000 samples, as before)"),
        ("labels", "val: other values of label (1,000 samples with the same inputs)"),
    ],
)
def test_resume_refuses_other_data_unless_forced(how: str, words: str, copy: Path, tmp_path: Path, launch):
    (tmp_path / "changed").write_text(how)
    refused(launch, copy, "the data are not those this run was started with", words, "--force")
    if how == "inputs":
        forced = launch("resume", str(copy), "--force", code=0)
        assert words in forced.stdout


def test_resume_without_one_whole_checkpoint_changes_nothing(copy: Path, launch):
    steps = sorted((copy / "checkpoints" / "classify").glob("step-*"))
    assert [p.name for p in steps] == ["step-16", "step-20", "step-8"]
    os.truncate(steps[0] / "state.pt", 100)
    (steps[1] / "manifest.json").unlink()
    (steps[2] / "manifest.json").write_bytes(b"\xff[]")
    named = (
        "step-16: state.pt does not match its hash",
        "step-20: incomplete",
        "step-8: manifest.json cannot be understood",
    )
    refused(launch, copy, "is complete", *named)
    shutil.rmtree(copy / "checkpoints" / "classify")  # it began again at step 0, without a word
    refused(launch, copy, "has no checkpoints", "no checkpoint in")
    shutil.rmtree(copy / "checkpoints")
    refused(launch, copy, "has no checkpoints")


def test_what_cannot_be_read_now_is_not_damaged(copy: Path, launch):
    state = copy / "checkpoints" / "classify" / "step-20" / "state.pt"
    state.unlink()
    state.symlink_to(state)  # "too many levels": an error of reading that says nothing of the content
    refused(launch, copy, "cannot be read now", "step-20")


def test_checkpoints_of_another_seed_or_recipe_are_refused(copy: Path, unfinished: Path, launch):
    args = copy / "args.json"
    whole = args.read_text()
    args.write_text(whole.replace('"seed": 0', '"seed": 1'))
    refused(launch, copy, "is of another run", "seed 0", "seed 1")
    mine = unfinished.parents[2] / "mine.py"
    other = mine.with_name("other.py")
    shutil.copy(mine, other)
    args.write_text(whole.replace(str(mine), str(other)))
    refused(launch, copy, "is of another run", "recipe mine", "recipe other", argv=("--force",))


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("environment.json", "with which sources this run was started"),
        ("data.json", "the data of this run's start are unknown"),
    ],
)
def test_resume_knows_nothing_of_a_run_whose_notes_are_gone(file: str, words: str, copy: Path, launch):
    """A file that a kill or a full disk cut off is no permission to compare nothing."""
    os.truncate(copy / file, 100)
    refused(launch, copy, file, words, "--force")
    (copy / file).unlink()
    refused(launch, copy, file, words, "--force")


def test_resume_refuses_other_settings_and_reports_other_packages(copy: Path, launch):
    args, environment = copy / "args.json", copy / "environment.json"
    rate = read(args)["settings"]["optim"]["lr"]
    args.write_text(
        args.read_text().replace(f'"lr": {rate}', '"lr": 0.5').replace('"save_steps": 8', '"save_steps": 9')
    )
    known = read(environment)
    environment.write_text(json.dumps({**known, "versions": {**known["versions"], "torch": "1.0"}}))
    done = refused(launch, copy, f"optim.lr is 0.5, was {rate}", "args.json was edited", "--force")
    assert "save_steps" not in done.stderr, "where and how often to save may change"
    forced = launch("resume", str(copy), "--force", code=0)
    assert "environment.SCALE_OF_MINE" not in done.stderr
    (copy / "summary.json").unlink()
    args.write_text(args.read_text().replace('"lr": 0.5', f'"lr": {rate}'))
    other = launch("resume", str(copy), SCALE_OF_MINE="2", code=0)
    assert "environment variables that the recipe reads have changed since the run began: SCALE_OF_MINE" in other.stdout
    assert f"packages have changed since the run began: torch 1.0 -> {torch.__version__.split('+')[0]}" in forced.stdout


def test_weights_that_are_not_those_that_were_saved_are_not_reported(copy: Path, launch, tmp_path: Path):
    """Of the best evaluation, at the end of a run and where another one starts from them."""
    (best,) = copy.glob("checkpoints/classify/best_val_*/model.safetensors")
    other = next(copy.glob("checkpoints/classify/step-8/model.safetensors"))
    shutil.copy(other, best)
    args = copy / "args.json"
    args.write_text(args.read_text().replace('"export": "final"', '"export": "best"'))
    done = launch("resume", str(copy), code=2)
    holds(done.stderr, "are not those that were saved", "model.safetensors does not match its hash")
    assert_refused(launch("check", "vision/classify", "--init-from", str(best)), "does not match its hash")


def test_a_run_folder_that_was_copied_without_links_goes_on(unfinished: Path, tmp_path: Path, launch):
    """As object stores and `cp -L` leave it: `latest` and the best weights are whole folders."""
    copied = Path(shutil.copytree(unfinished, tmp_path / "copy", symlinks=False))
    place = copied / "checkpoints" / "classify"
    shutil.rmtree(place / "step-20")
    done = launch("resume", str(copied), code=0)
    assert "resumed from step-16" in done.stdout
    assert (place / "latest").is_symlink()
    assert (place / "latest").resolve().name == "step-20"


def test_a_report_that_cannot_be_written_is_no_crash_and_nothing_to_resume(launch, tmp_path: Path):
    source = (ROOT / "recipes/vision/classify.py").read_text()
    (tmp_path / "mine.py").write_text(
        patched(source, (LOOP, '    (run.folder / "report.html" / "x").mkdir(parents=True)\n' + LOOP))
    )
    done = launch("run", "mine.py", *QUICK, code=4)
    holds(done.stderr, "its report cannot be written", "trainworthy report")
    assert "Traceback" not in done.stderr
    assert (done.folder() / "summary.json").is_file()


def test_a_late_import_is_no_change_and_its_change_is_one(copy: Path, unfinished: Path, launch):
    """And what a kill left half done is cleaned."""
    place = copy / "checkpoints" / "classify"
    shutil.copytree(place / "step-8", place / ".trash-step-8")
    os.rename(place / "step-20", place / ".trash-step-20")  # moved aside for another of the same step, which never came
    (place / ".writing-step-24").mkdir()
    done = launch("resume", str(copy), code=0)
    assert "resumed from step-20" in done.stdout
    assert not list(place.glob(".[twl]*")), list(place.iterdir())
    (copy / "summary.json").unlink()
    neighbour = unfinished.parents[2] / "neighbour_of_mine.py"
    source = neighbour.read_text()
    neighbour.write_text("SEEN = False\n")
    changed = launch("resume", str(copy))
    neighbour.write_text(source)
    assert changed.returncode == 2, changed.shown
    assert "changed: neighbour_of_mine.py" in changed.stderr


def test_saving_by_minutes(launch, tmp_path: Path):
    done = launch(
        "run", "vision/classify", *QUICK, "--run.save-minutes", "0.00001", "--run.keep-checkpoints", "30", code=0
    )
    assert len(list(done.folder().glob("checkpoints/classify/step-*"))) == 20
    assert_refused(launch("run", "vision/classify", "--run.save-minutes", "-1"), "--run.save-minutes")


def test_a_save_does_not_wait_for_the_best_weights(tmp_path: Path):
    import threading

    store, held = checkpoint.Checkpoints(tmp_path / "stage"), threading.Event()
    net = torch.nn.Linear(2, 2)
    store._writer.submit(held.wait)  # a slow disk
    store.save_best(1, net, {}, metric="x", best=[1])
    store.save(1, net, {}, {})  # returns although the best weights are not written
    assert not store.steps()
    held.set()
    store.close()
    assert store.newest().name == "step-1"
    assert (tmp_path / "stage" / "best_val_x").resolve().name == "best-step-1"


# ----------------------------------------------------------------------------------------------------------- all samples
class Records(Data):
    """Samples that are read from raw records, slowly."""

    def __init__(self, names: list[str]):
        self.names = names
        self.fields = {"x": Field("input"), "y": Field("target", classes=("a", "b"))}

    def __len__(self) -> int:
        return len(self.names)

    def identity(self, index: int) -> str:
        return self.names[index]

    def peek(self, index: int, key: str):
        return index % 2 if key == "y" else super().peek(index, key)

    def get(self, index: int, generator: torch.Generator | None) -> dict:
        draw = torch.Generator().manual_seed(hash(self.names[index]) % 2**32)
        return {"x": torch.randn(40, generator=draw), "y": index % 2}


def test_exact_copies_are_found_over_all_samples():
    """A hundredth of the validation set copied, a fiftieth of the samples read."""
    train, val = [f"t{i}" for i in range(10_000)], [f"v{i}" for i in range(2_000)]
    val[:2000:100] = train[3:10_000:500]
    scans = {
        k: inventory.scan(k, Records(names), samples=len(names) // 50) for k, names in (("train", train), ("val", val))
    }
    found = inventory.overlap(scans["train"], scans["val"])
    assert found["exact"] == 20
    assert found["exact_pairs"][1] == (100, 503)
    assert found["compared"] == {"exact": [2000, 10_000], "near": [40, 200], "of": [2000, 10_000]}


def test_inputs_under_two_classes_are_counted():
    names = [f"t{i}" for i in range(1000)]
    names[1:40:2] = names[0:39:2]  # twenty pairs, each under both classes
    found = inventory.scan("train", Records(names), samples=10).contradictory
    assert (found["samples"], found["of"], found["pairs"][0]) == (40, 1000, (0, 1))
    assert contents.refused(found)
    few = inventory.scan("train", Records([f"t{i // 500}" for i in range(1000)]), samples=10).contradictory
    assert few["samples"] == 1000
    assert not contents.refused(few)  # two different inputs: they identify nothing


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures with a copy of a training picture in val, and one in six of another class's folder."""
    root = write_folder(tmp_path_factory.mktemp("pictures") / "data", per_class=12, held_out=4)
    files = sorted((root / "train" / "digit 3").glob("*"))
    shutil.copy(files[0], root / "val" / "digit 3" / "again.png")
    for file in sorted((root / "train" / "digit 4").glob("*")):
        shutil.copy(file, root / "train" / "digit 5" / f"again-{file.name}")
    return root


def test_copies_and_torn_labels_of_pictures_stop_a_check(folder: Path, launch):
    done = launch("check", "vision/classify", "--data.path", str(folder), "--only", "data,leakage", code=3)
    verdicts = {v["id"]: v for v in done.verdicts()}
    assert "16 of 88 samples have an input that also occurs with another 'label'" in verdicts["data"]["measured"]
    assert "1 exact" in verdicts["leakage"]["measured"]


def test_data_compares_all_records_and_names_the_users_settings(folder: Path, launch):
    done = launch("data", "vision/classify", "--data.path", str(folder), "--sample", "5", code=0)
    holds(done.stdout, "1 of 41", f"trainworthy check vision/classify --data.path {folder} --only data,leakage")


# ------------------------------------------------------------------------------------------------------------ validation
def test_a_validation_split_too_small_is_refused_at_once_and_can_be_given(tmp_path: Path, launch):
    root = write_folder(tmp_path / "data", per_class=12, held_out=4)
    for file in sorted((root / "val").glob("*/*"))[1:]:
        file.unlink()
    path = ("--data.path", str(root))
    small = launch("run", "vision/classify", *path, code=2)
    holds(small.stderr, "validation split is too small", "1 sample(s)", "at least 10: one of each class", "--data.val")
    assert not (tmp_path / "runs").exists()
    given = launch("check", "vision/classify", *path, "--data.val", "0.25", "--only", "schema", code=0)
    assert "60 train / 20 val" in " ".join(given.stdout.split()), given.shown
    wrong = launch("check", "vision/classify", *path, "--data.val", "1.5", "--only", "schema", code=2)
    assert "--data.val is not a share" in wrong.stderr


def test_an_interrupted_check_names_itself_as_the_next_command(tmp_path: Path):
    child = start("check", "vision/classify", "--optim.lr", "0.003", cwd=tmp_path)
    for line in child.stdout:
        if line.startswith("gates"):
            break
    child.send_signal(signal.SIGTERM)
    output = child.communicate(timeout=100)[0]
    assert "trainworthy check vision/classify --optim.lr 0.003" in output
    assert "resume" not in output.split("interrupted")[-1]


def test_identity_is_kept_with_the_run(unfinished: Path):
    found = read(unfinished / "data.json")["identity"]["none"]
    assert {k: (v["samples"], v["hashed"]) for k, v in found.items()} == {
        "train": (4000, 4000),
        "val": (1000, 1000),
        "test": (1000, 1000),
    }
    runs = [read(p)["run"] for p in unfinished.glob("checkpoints/*/step-*/info.json")]
    assert {(run["recipe"], run["seed"]) for run in runs} == {("mine", 0)}
    assert all(run["settings"]["optim"]["lr"] > 0 for run in runs)
