"""The export is read by a fresh process, before the run from the overfit model and at its end: same answers, same metric."""

import pytest

from tests.helpers.commands import read
from tests.helpers.pictures import write_coloured
from tests.vision.planted_classify import IMAGE

FRESH = (
    "net, shape = ema.model if ema else model, tuple(",
    "net, shape = make_model(cfg, train_data, classes).model, tuple(",
)
SWAPPED = ("            image = self.fit(image)\n", "            image = self.fit(image).flip(0)\n")
SMALL = ("--image-size", "32", "--run.no-tensorboard", "--train.batch-size", "32")


@pytest.fixture(scope="module")
def coloured(tmp_path_factory):
    return write_coloured(tmp_path_factory.mktemp("data") / "coloured")


def test_an_export_of_a_freshly_built_net_is_stopped_before_the_run(launch, fork):
    done = launch("check", str(fork(FRESH)), "--only", "export", code=3)
    (verdict,) = done.verdicts()
    assert verdict["remedy"].startswith("the export holds a net that was never trained"), done.shown


def test_an_export_of_a_freshly_built_net_ends_the_run_with_4(launch, fork):
    done = launch("run", str(fork(FRESH)), "--train.epochs", "1", "--gates.no-enabled", "--run.no-tensorboard", code=4)
    assert "is not what was scored" in done.stderr
    assert {v["id"]: v["verdict"] for v in read(done.folder() / "monitors.json")["monitors"]}["export"] == "fail"
    assert (done.folder() / "summary.json").exists()  # nothing is lost


def test_channels_in_another_order_at_evaluation_are_read_off_the_export(launch, fork, coloured):
    done = launch("check", str(fork(SWAPPED)), "--data.path", str(coloured), *SMALL, "--only", "export", code=3)
    (verdict,) = done.verdicts()
    assert verdict["remedy"].startswith("the weights are right"), done.shown


@pytest.mark.parametrize(
    "argv",
    [
        ("vision/classify", "--model", "resnet18", "--image-size", "64", "--ema", "0.9"),
        pytest.param(("vision/detect", "--data.scenes", "200", "--model", "retinanet"), marks=pytest.mark.verify),
    ],
    ids=lambda argv: argv[0],
)
def test_healthy_exports_are_read_alike(launch, argv, coloured):
    own = ("--data.path", str(coloured)) if "classify" in argv[0] else ()
    done = launch("check", *argv, *own, "--run.no-tensorboard", "--only", "export", code=0)
    (verdict,) = done.verdicts()
    assert all(v < 1e-3 for v in verdict["evidence"]["differences"].values()), done.shown
    assert len(verdict["evidence"]["differences"]) == 1 + ("--ema" in argv)  # torchvision's constructor, too


CONTRAST = "image = 0.25 + 0.5 * self.images[index].float() / 255\n"
PADDED = "image = F.pad(self.images[index].float() / 255, (2, 2, 2, 2))\n"


@pytest.mark.parametrize("image", [CONTRAST, PADDED], ids=["contrast", "padded"])
def test_a_fork_that_prepares_pictures_otherwise_is_no_fault_of_its_export(launch, fork, image):
    done = launch("check", str(fork((IMAGE, image))), "--only", "export", code=0)
    assert "as get() makes them get the same answers" in done.verdicts()[0]["measured"]
