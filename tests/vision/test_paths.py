"""Training path against evaluation path, and one split's classes against another's: by content, names, performance, confusion."""

import pytest
import torch
from trainworthy.core.gates.checks.paths import exchanged_channels, exchanges

from tests.helpers.commands import read
from tests.helpers.pictures import write_coloured
from tests.vision.planted_classify import VAL_DATA

SWAPPED = ("            image = self.fit(image)\n", "            image = self.fit(image).flip(0)\n")
RELABELLED = (
    VAL_DATA,
    "order = torch.arange(10).index_put((torch.tensor([4, 9]),), torch.tensor([9, 4]))\n"
    "    val_data = Images(images[held_out], order[labels[held_out]], classes)\n",
)
UPSIDE_DOWN = (VAL_DATA, VAL_DATA.replace("labels[held_out]", "2 - labels[held_out]"))
SMALL = ("--image-size", "32", "--run.no-tensorboard", "--train.batch-size", "32")


@pytest.fixture(scope="module")
def coloured(tmp_path_factory):
    return write_coloured(tmp_path_factory.mktemp("data") / "coloured")


def by_id(done) -> dict[str, dict]:
    return {v["id"]: v for v in done.verdicts()}


@pytest.mark.verify  # test_export has the same fault
def test_channels_in_another_order_at_evaluation_are_seen_by_content_and_by_performance(launch, fork, coloured):
    """The accuracy of a run falls from 0.70 to 0.40, and its loss does not change."""
    done = launch(
        "check", str(fork(SWAPPED)), "--data.path", str(coloured), *SMALL, "--only", "data,tiny-data", timeout=400
    )
    assert done.returncode == 3, done.shown
    found = by_id(done)
    assert (
        "channels of the evaluation path are those of the training path in the order 2 1 0" in found["data"]["measured"]
    )
    assert found["tiny-data"]["evidence"]["behind"], done.shown
    assert found["tiny-data"]["remedy"].startswith("the evaluation path reads samples differently"), done.shown


def test_coloured_pictures_with_augmentation_raise_no_alarm(launch, coloured):
    done = launch(
        "check", "vision/classify", "--data.path", str(coloured), *SMALL, "--only", "data,tiny-data", timeout=400
    )
    assert done.returncode == 0, done.shown


def test_a_folder_that_is_another_class_in_another_split_is_named(launch, fork, coloured):
    done = launch("check", str(fork(UPSIDE_DOWN)), "--data.path", str(coloured), *SMALL, "--only", "data")
    assert done.returncode == 3, done.shown
    assert "samples of folder 'cold' have class 0 in train and class 2 in val" in by_id(done)["data"]["measured"]


def test_classes_exchanged_in_validation_only_stop_the_run(launch, fork):
    done = launch("run", str(fork(RELABELLED)), "--train.epochs", "8", "--gates.no-enabled", "--run.no-tensorboard")
    assert done.returncode == 4, done.shown
    assert "4 for 9, 9 for 4" in done.stderr, done.shown
    assert "regularisation" not in done.stdout + done.stderr


def test_a_healthy_run_has_no_exchanged_classes(launch):
    done = launch("run", "vision/classify", "--train.epochs", "4", "--gates.no-enabled", "--run.no-tensorboard")
    assert done.returncode == 0, done.shown
    found = {v["id"]: v["verdict"] for v in read(done.folder() / "monitors.json")["monitors"]}
    assert found["classes"] == found["export"] == "pass"


def test_exchanges_need_training_samples_that_do_not():
    same = 80 * torch.eye(5) + 5
    held_out = same[[0, 1, 3, 2, 4]]
    (one,) = exchanges(same, held_out)
    assert one.classes == [2, 3]
    assert one.sure
    assert not any(e.sure for e in exchanges(held_out, held_out))  # shared by both: no class is called otherwise here
    assert not exchanges(same, same)
    confused = same.clone()
    confused[1] = confused[2]  # one class is taken for another, which is a weakness and no exchange
    assert not exchanges(same, confused)


def test_augmentation_and_grey_pictures_exchange_no_channels():
    generator = torch.Generator().manual_seed(0)
    colours = torch.rand(256, 3, 1, 1, generator=generator).expand(-1, -1, 8, 8)
    jittered = (colours * (0.6 + 0.8 * torch.rand(256, 3, 1, 1, generator=generator))).clamp(0, 1)
    assert exchanged_channels(jittered, colours) is None
    assert exchanged_channels(colours[:, [1, 0, 2]], colours) == (1, 0, 2)
    grey = colours[:, :1].expand(-1, 3, -1, -1)
    assert exchanged_channels(grey, grey) is None
