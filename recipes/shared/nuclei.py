"""A real microscope picture of 125 cell nuclei, 512x512, each outlined manually (2018 Data Science Bowl; Caicedo et al. 2019,
Nature Methods 16; as the package stardist ships it, BSD-3)."""

from functools import cache

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from trainworthy.core.data.assets import fetch_member

CLASSES = ("background", "nucleus")
LEARN = 342
"""Columns from the left for training; the other 170, the right third, are held out."""
HASHES = {
    "img2d.tif": "f9ccc1571b92c861ff87e28463068b43f61bd47357ed0503f711e5cd1eb97750",
    "mask2d.tif": "59ad5e820b7982ca9d13e946fa6e7f64e2714899e00a2ae6c69aa79aad53d46f",
}


@cache
def load() -> tuple[Tensor, Tensor]:
    """(picture (512, 512) uint8, its brightness 0-235; mask (512, 512) uint8: 0 background, 1 nucleus)."""
    # uint16: the file's depth, not its range.
    picture, outlines = (np.asarray(Image.open(_file(name))) for name in HASHES)
    return torch.from_numpy(picture.astype(np.uint8)), torch.from_numpy((outlines > 0).astype(np.uint8))


def _file(name: str):
    return fetch_member(
        "stardist==0.9.2",
        wheel_sha256="2316c0feb7bd5621e7a277cb3868df475c338943c591925c420ee3622c42f023",
        tag="cp311-cp311-manylinux_2_28_x86_64",
        member=f"stardist/data/images/{name}",
        member_sha256=HASHES[name],
        licence="BSD-3",
    )
