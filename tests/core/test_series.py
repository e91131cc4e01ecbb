"""Frames of one series in two splits: what names say, and what content confirms."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from trainworthy.core.data import series

from tests.helpers.pictures import chosen, encoded


@pytest.mark.parametrize(("name", "of"), [
    ("cats/video12_007.png", "cats/video12"), ("cats/video12/frame-7.png", "cats/video12/frame"), ("IMG_0001.jpg", "IMG"),
    ("shot (3).jpg", "shot"), ("7.png", "."), ("a/dog4_jpg.rf.0b1c2d.jpg", "a/dog4_jpg"), ("slide7_x3_y12.png", "slide7_x3_y"),
])  # fmt: skip
def test_the_counter_at_the_end_is_dropped(name, of):
    assert series.series_of(name) == of


def test_series_in_both_splits_are_torn_only_where_content_agrees():
    names = [f"v{i:03}_{k}" for i in range(60) for k in range(5)]
    train, val = [n for n in names if n[-1] != "0"], [n for n in names if n[-1] == "0"]
    own = [train.index(f"{n[:-1]}1") for n in val]
    assert series.torn(val, train, own)["torn"]
    other = [(i + 40) % len(train) for i in own]
    assert not series.torn(val, train, other)["torn"]


def test_names_that_form_no_small_series_say_nothing():
    names = [f"IMG_{i:04}" for i in range(300)]
    assert series.torn(names[:60], names[60:], list(range(60))) is None
    kinds = [f"{kind}_{i:03}" for kind in ("rose", "tulip", "aster") for i in range(100)]
    assert series.torn(kinds[::5], kinds, list(range(60))) is None


def write(root: Path, *, apart: bool) -> Path:
    """15 shots of each of ten digits, eight frames of each; `apart`: whole shots are held out, else the frames are one folder."""
    draw = torch.Generator().manual_seed(0)
    for n, (image, label) in enumerate(chosen(15)):
        pixels = torch.from_numpy(np.array(image)).float()
        for k in range(8):
            moved = pixels.roll((k % 3 - 1, k // 3 - 1), (0, 1)) + 8 * torch.randn(28, 28, generator=draw)
            frame = Image.fromarray(moved.clamp(0, 255).byte().numpy())
            split = ("val" if n % 5 == 0 else "train") if apart else ""
            (file := root / split / str(label) / f"shot{n:03}_{k}.png").parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(encoded(frame))
    return root


@pytest.mark.parametrize("apart", [False, True])
def test_leakage_names_frames_of_one_shot(tmp_path, apart, launch):
    root = write(tmp_path / "frames", apart=apart)
    done = launch("check", "vision/classify", "--data.path", root, "--image-size", "32", "--only", "leakage")
    assert done.returncode == (0 if apart else 3), done.shown
    assert ("are of one series: put each series as a whole into one split" in done.stdout) is not apart
