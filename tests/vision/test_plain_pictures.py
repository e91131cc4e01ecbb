"""Copies between splits that are none: drawings of few tones and windows without content. Copies that are some."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.helpers.commands import holds


def write(split: Path, name: str, picture: np.ndarray, mask: np.ndarray, level: int = 6) -> None:
    """Write one picture with its mask; `level` of the compression, which changes the bytes of a file and not its pixels."""
    for folder, values in (("images", picture), ("masks", mask)):
        (split / folder).mkdir(parents=True, exist_ok=True)
        Image.fromarray(values).save(split / folder / f"{name}.png", compress_level=level)


def drawing(rng: np.random.Generator, side: int, low: int, high: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a picture of one grey rectangle on another grey, and its mask."""
    picture, mask = np.full((side, side), 70, np.uint8), np.zeros((side, side), np.uint8)
    top, left = rng.integers(0, side - low, 2) // 8 * 8
    height, width = rng.integers(low, high, 2)
    picture[top : top + height, left : left + width] = 170
    mask[picture == 170] = 1
    return picture, mask


def cells(rng: np.random.Generator, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a mottled square at an own place in a black frame, as scans have one, with a bright spot in it."""
    picture, mask = np.zeros((side, side), np.uint8), np.zeros((side, side), np.uint8)
    top, left = rng.integers(8, side // 2 - 8, 2)
    part = slice(top, top + side // 2), slice(left, left + side // 2)
    picture[part] = np.kron(rng.integers(40, 170, (side // 16, side // 16)), np.ones((8, 8)))
    mask[top + 20 : top + 40, left + 20 : left + 40] = 1
    picture[mask == 1] = rng.integers(180, 250, int(mask.sum()))
    return picture, mask


@pytest.mark.parametrize(
    ("kind", "passes", "words"),
    [
        ("drawings", True, ("at most 16 tones, and training ones are as alike", "copies are expected by chance")),
        ("frames", True, ("of the exact ones have one value everywhere (empty windows): no copies",)),
        ("drawings, validated on training pictures", False, ("copies are expected by chance", "--gates.waive leakage")),
        ("frames, validated on training pictures", False, ("(empty windows): no copies", "unsplit data")),
    ],
)
def test_what_looks_alike_is_no_copy_and_what_was_copied_is_one(kind, passes, words, tmp_path: Path, launch):
    rng = np.random.default_rng(0)
    pictures = [drawing(rng, 128, 40, 90) if "drawings" in kind else cells(rng, 192) for _ in range(40)]
    first = 24 if "validated" in kind else 32
    for i, pair in enumerate(pictures[:32]):
        write(tmp_path / "set" / "train", f"{i}a", *pair)
    for i, pair in enumerate(pictures[first:40]):
        write(tmp_path / "set" / "val", f"{i}b", *pair, level=1)
    # `scored` knows the answers by the pictures: equal windows with other masks must not be among its samples
    done = launch("check", "vision/segment", "--data.path", "set", "--only", "leakage,scored", code=0 if passes else 3)
    assert "FAIL   scored" not in done.stdout
    holds(done.stdout, *words)


def test_a_few_pictures_that_were_saved_again_are_named(tmp_path: Path, launch):
    rng = np.random.default_rng(0)
    for label in ("left", "right"):
        for i in range(40):
            picture = np.kron(rng.integers(0, 255, (8, 8, 3)), np.ones((8, 8, 1))).astype(np.uint8)
            file = tmp_path / "set" / ("val" if i % 4 == 0 else "train") / label / f"{i}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(picture).save(file)
            if label == "left" and i in (0, 4):
                Image.fromarray(picture).save(tmp_path / "set" / f"{i} (1).jpg", quality=70)
    for i in (0, 4):
        (tmp_path / "set" / f"{i} (1).jpg").rename(tmp_path / "set" / "train" / "left" / f"{i} (1).jpg")
    done = launch("check", "vision/classify", "--data.path", "set", "--image-size", "32", "--only", "leakage", code=3)
    holds(
        done.stdout,
        "2 near duplicates of 20",
        "left/0.png, in training",
        "left/0 (1).jpg",
        "likely causes a few samples were saved again",
    )
