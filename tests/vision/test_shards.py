"""vision/classify on WebDataset's shards: tar files of KEY.png and KEY.cls or KEY.json."""

import io
import json
import tarfile
from pathlib import Path

import pytest
import torch
from trainworthy.core import UserError
from trainworthy.recipes.vision.data import pictures

from tests.core.test_life import _stop_at
from tests.helpers.commands import assert_same_run, run_folder, trainworthy
from tests.helpers.pictures import chosen, encoded

SMALL = (
    "--preset",
    "tiny",
    "--image-size",
    "28",
    "--loader.workers",
    "0",
    "--run.no-tensorboard",
    "--gates.no-enabled",
)
SIZES = {"train-0000": 130, "train-0001": 117, "train-0002": 53, "val-0000": 100}  # uneven, as shards are


def add(shard: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    shard.addfile(member, io.BytesIO(content))


def write_shards(root: Path, *, named: bool = False, sizes: dict[str, int] = SIZES, bad: int | None = None) -> Path:
    """400 real digits in an order of their own; `named`: classes by name in a JSON; `bad`: no picture, but text, at that place."""
    root.mkdir(parents=True)
    found = chosen(40)
    rows = [found[i] for i in torch.randperm(400, generator=torch.Generator().manual_seed(0)).tolist()]
    first = 0
    for name, size in sizes.items():
        with tarfile.open(root / f"{name}.tar", "w") as shard:
            for k, (image, label) in enumerate(rows[first : first + size], first):
                add(shard, f"images/{k:06d}.png", b"no picture" if k == bad else encoded(image))
                of = {"label": f"digit {label}", "width": 28}
                add(
                    shard,
                    f"images/{k:06d}.{'json' if named else 'cls'}",
                    (json.dumps(of) if named else f"{label}\n").encode(),
                )
        first += size
    return root


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    return write_shards(tmp_path_factory.mktemp("data") / "shards")


@pytest.mark.parametrize("streaming", [False, True])
def test_pictures_classes_and_splits_are_those_written(shards, streaming):
    found = pictures.load(pictures.Source(str(shards), streaming=streaming))
    assert found.classes == tuple(map(str, range(10)))
    assert (len(found.learn), len(found.held_out), found.test) == (300, 100, None)
    written = chosen(40)
    order = torch.randperm(400, generator=torch.Generator().manual_seed(0)).tolist()
    for row in (0, 129, 130, 246, 299, 300, 399):
        image, label = written[order[row]]
        assert torch.equal(found.images[row][0], pictures.decode(image)[0])
        assert found.labels[row] == label


def test_each_picture_is_read_once_in_an_order_over_shards(shards):
    train = (found := pictures.load(pictures.Source(str(shards), streaming=True))).images[found.learn]
    order = train.order(0, "order", 1)
    assert sorted(order.tolist()) == list(range(300))
    assert torch.equal(order, train.order(0, "order", 1))
    assert not torch.equal(order, train.order(0, "order", 2))
    assert train.near(140) == range(130, 247)


def test_names_in_json_and_a_share_for_validation(tmp_path):
    root = write_shards(tmp_path / "named", named=True, sizes={"part-0": 250, "part-1": 150})
    found = pictures.load(pictures.Source(str(root), val="0.25"))
    assert found.classes == tuple(f"digit {i}" for i in range(10))
    assert torch.bincount(found.labels[found.held_out]).tolist() == [10] * 10


def test_what_is_no_picture_is_left_out_and_named(tmp_path):
    root = write_shards(tmp_path / "bad", bad=131)
    found = pictures.load(pictures.Source(str(root)))
    assert len(found.labels) == 399
    assert "train-0001.tar: images/000131.png (not a picture)" in found.notes["left out"]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def pressed(path: Path) -> None:
    import gzip

    path.write_bytes(gzip.compress(path.read_bytes()))


def without_classes(path: Path) -> None:
    with tarfile.open(path, "w") as shard:
        add(shard, "a.png", encoded(chosen(40)[0][0]))


@pytest.mark.parametrize(("damage", "said"), [(cut, "cannot read the shard train-0001.tar"), (pressed, "an uncompressed tar file"),
                                              (without_classes, "1 of 1 samples of the shard train-0001.tar lack")])  # fmt: skip
def test_damaged_shards_are_named(tmp_path, damage, said, launch):
    root = write_shards(tmp_path / "shards")
    damage(root / "train-0001.tar")
    done = launch("check", "vision/classify", *SMALL, "--data.path", root)
    assert done.returncode == 2, done.shown
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_download_beside_class_folders_is_not_the_data(tmp_path):
    from tests.helpers.pictures import write_folder

    root = write_folder(tmp_path / "folder", per_class=20)
    with tarfile.open(root / "download.tar", "w") as shard:
        shard.add(root / "val", "val")
    assert pictures.load(pictures.Source(str(root))).classes == tuple(f"digit {i}" for i in range(10))
    with pytest.raises(UserError, match="reads parquet or tar files"):
        pictures.load(pictures.Source(str(root), streaming=True))


def test_a_streamed_run_resumes_bitwise(shards, tmp_path):
    argv = ("run", "vision/classify", *SMALL, "--data.path", shards, "--data.streaming", "--train.batch-size", "8", "--train.epochs", "1",
            "--run.save-steps", "3")  # fmt: skip
    straight = trainworthy(*argv, cwd=tmp_path)
    assert straight.returncode == 0, straight.stderr
    whole = run_folder(tmp_path)
    (tmp_path / "again").mkdir()
    code, folder, said = _stop_at(tmp_path / "again", 9, *argv)
    assert code == 5, said
    resumed = trainworthy("resume", folder, cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert_same_run(folder, whole)
