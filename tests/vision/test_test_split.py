"""The test split: evaluated once, at the end, on samples that nothing was chosen on; shown beside the number on val."""

import shutil

import pytest

from tests.conftest import ROOT
from tests.helpers.commands import read
from tests.helpers.pictures import write_folder

NET = ("--image-size", "32", "--run.no-tensorboard", "--train.epochs", "2", "--train.batch-size", "32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """train/, val/ and test/ of three classes; the test pictures are other ones."""
    root = write_folder(tmp_path_factory.mktemp("data") / "own", per_class=60, held_out=20, classes=3)
    for place in sorted((root / "val").glob("*")):
        (root / "test" / place.name).mkdir(parents=True)
        for file in sorted(place.iterdir())[::2]:
            shutil.move(file, root / "test" / place.name / file.name)
    return root


def test_the_test_split_is_evaluated_once_and_reported(launch, folder):
    done = launch("run", "vision/classify", "--data.path", str(folder), *NET, "--gates.no-enabled")
    assert done.returncode == 0, done.shown
    out = done.folder()
    summary = read(out / "summary.json")
    assert read(out / "data.json")["splits"]["test"]["samples"] == summary["test"]["samples"] == 30
    assert 0 <= summary["test"]["metrics"]["accuracy"] <= 1
    shown = f"{summary['test']['metrics']['accuracy']:.4f}"
    assert "on the test split (30)" in done.stdout
    assert f"accuracy {shown} on the 30 samples of the test split" in (out / "card.md").read_text()
    assert "30 samples of the test split" in (out / "report.html").read_text()
    assert not [
        k for row in read(out / "epoch_metrics.jsonl") for k in row if "test" in k
    ]  # no choice can depend on it


@pytest.fixture(scope="module")
def two_parts(tmp_path_factory):
    """train/ and val/ alone."""
    return write_folder(tmp_path_factory.mktemp("data") / "two", per_class=30, held_out=10, classes=3)


def test_a_run_without_a_test_split_says_so(launch, two_parts):
    done = launch("run", "vision/classify", "--data.path", str(two_parts), *NET, "--gates.no-enabled")
    assert done.returncode == 0, done.shown
    assert read(done.folder() / "summary.json")["test"] is None
    assert "no test split" in (done.folder() / "card.md").read_text()


def test_the_digits_have_a_test_set_by_other_writers(launch):
    """1,000 digits of MNIST's test set; the digits to learn from and to validate on are what they were."""
    done = launch("run", "vision/classify", "--train.epochs", "0.1", "--gates.no-enabled", "--run.no-tensorboard")
    assert done.returncode == 0, done.shown
    out = done.folder()
    assert read(out / "summary.json")["test"]["samples"] == 1000
    assert "on the test split (1,000)" in done.stdout
    found = read(out / "data.json")
    assert {k: s["samples"] for k, s in found["splits"].items()} == {"train": 4000, "val": 1000, "test": 1000}
    assert [found["overlaps"][k]["exact"] for k in ("test in train", "test in val")] == [0, 0]
    band = read(ROOT / "recipes/vision/results/classify.band.json")
    assert found["fingerprint"] == band["data"], "the band of healthy runs still belongs to these data"
    done = launch("data", "vision/classify", "--data.test", "0.1")
    assert done.returncode == 2, done.shown
    assert "the digits have a test set" in done.stderr


def test_a_training_picture_in_the_test_split_is_stopped(launch, folder, tmp_path):
    leaky = shutil.copytree(folder, tmp_path / "leaky")
    file = next((leaky / "train" / "digit 1").glob("*.png"))
    shutil.copy(file, leaky / "test" / "digit 1" / f"again{file.suffix}")
    done = launch("check", "vision/classify", "--data.path", str(leaky), *NET, "--only", "leakage")
    assert done.returncode == 3, done.shown
    assert "1 exact duplicates of test in train" in done.stdout
    assert "likely causes the test set shares samples with another split" in " ".join(done.stdout.split())


def test_a_share_of_the_training_pictures_can_be_the_test_split(launch, two_parts):
    done = launch("data", "vision/classify", "--data.path", str(two_parts), *NET[:2], "--data.test", "0.1", "--json")
    assert done.returncode == 0, done.shown
    assert '"test"' in done.stdout
