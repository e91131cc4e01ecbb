"""Six real photos as backgrounds, split into training and held-out ones (public domain or CC0, as shipped with the
package scikit-image)."""

from functools import cache

import numpy as np
from PIL import Image
from trainworthy.core.data.assets import fetch_member

HASHES = {
    "astronaut.png": "88431cd9653ccd539741b555fb0a46b61558b301d4110412b5bc28b5e3ea6cb5",
    "chelsea.png": "596aa1e7cb875eb79f437e310381d26b338a81c2da23439704a73c4651e8c4bb",
    "coffee.png": "cc02f8ca188b167c775a7101b5d767d1e71792cf762c33d6fa15a4599b5a8de7",
    "gravel.png": "c48615b451bf1e606fbd72c0aa9f8cc0f068ab7111ef7d93bb9b0f2586440c12",
    "rocket.jpg": "c2dd0de7c538df8d111e479619b129464d0269d0ae5fd18ca91d33a7fdfea95c",
    "brick.png": "7966caf324f6ba843118d98f7a07746d22f6a343430add0233eca5f6eaaa8fcf",
}
HELD_OUT = ("coffee.png", "brick.png")  # on average as bright and colourful as the other four


@cache
def load(split: str) -> tuple[np.ndarray, ...]:
    """Photos (H, W, 3) uint8, 300 to 640 pixels a side: four for `train`, two others for `val`."""
    names = HELD_OUT if split == "val" else [n for n in HASHES if n not in HELD_OUT]
    return tuple(np.asarray(Image.open(_file(name)).convert("RGB")) for name in names)


def _file(name: str):
    return fetch_member(
        "scikit-image==0.26.0",
        wheel_sha256="7df650e79031634ac90b11e64a9eedaf5a5e06fcd09bcd03a34be01745744466",
        tag="cp312-cp312-manylinux_2_28_x86_64",
        member=f"skimage/data/{name}",
        member_sha256=HASHES[name],
        licence="public domain or CC0",
    )
