"""Composites: tinted MNIST digits on generated backgrounds, 64x64, with exactly known positions and colours.

Backgrounds are gradients with noise, not photos. The digits are split between training and validation before
composition. A scene and its image are functions of their generator.
"""

from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.random import Generator
from trainworthy.core.base import seeds
from trainworthy.recipes.shared import digits

SIDE, TILE = 64, 28  # pixels; a digit fills about 20 of its tile's 28
# Least distance of centres: from the border; from each other on one axis; on x, so that "left of" is unambiguous.
MARGIN, APART, ASIDE = 12, 20, 6
COLOURS = {"red": (225, 45, 45), "green": (60, 200, 70), "blue": (70, 110, 240), "yellow": (235, 215, 60)}
TINTS = np.array(list(COLOURS.values()), dtype=np.float32)


class Item(NamedTuple):
    """One digit of a scene."""

    digit: int
    colour: int
    """Index in COLOURS."""
    x: int
    y: int
    """Centre, in pixels from the upper left corner."""
    tile: int
    """Index of its image in the pool."""
    shade: tuple[float, float, float]
    """Added to the colour, so that shades of one colour vary."""


class Pool(NamedTuple):
    """The digits of one split."""

    tiles: np.ndarray
    """(n, 28, 28) uint8."""
    of: tuple[np.ndarray, ...]
    """For each digit, the indices of its images."""


def generator(*parts: int | str) -> Generator:
    """Return a generator that depends on `parts` alone."""
    return np.random.default_rng(seeds.derive("composites", *parts))


@cache
def pool(split: str) -> Pool:
    """Return the digits of `train` (4,000, 400 of each) or of `val` (1,000 others)."""
    images, labels = digits.load()
    learn, held_out = digits.split(labels)
    mine = learn if split == "train" else held_out
    labels = labels[mine].numpy()
    return Pool(images[mine, 0].numpy(), tuple((labels == d).nonzero()[0] for d in range(10)))


def places(rng: Generator, n: int, *, aside: int = ASIDE) -> list[tuple[int, int]]:
    """Return `n` centres with room between them, at least `aside` pixels along x."""
    while True:
        found: list[tuple[int, int]] = []
        for x, y in rng.integers(MARGIN, SIDE - MARGIN + 1, (40, 2)).tolist():
            if all(max(abs(x - a), abs(y - b)) >= APART and abs(x - a) >= aside for a, b in found):
                found.append((x, y))
            if len(found) == n:
                return found


def item(rng: Generator, split: str, place: tuple[int, int], *, digit: int, colour: int) -> Item:
    """Return a random sample of that digit, in that colour."""
    tile = int(rng.choice(pool(split).of[digit]))
    return Item(digit, colour, *place, tile, tuple(rng.normal(0, 15, 3).tolist()))


@cache
def _corners() -> np.ndarray:
    """(64 * 64, 4) weight of each corner at each pixel."""
    t = np.linspace(0, 1, SIDE, dtype=np.float32)
    y, x = np.meshgrid(t, t, indexing="ij")
    return np.stack([(1 - x) * (1 - y), x * (1 - y), (1 - x) * y, x * y], -1).reshape(-1, 4)


def render(rng: Generator, items: list[Item], tiles: np.ndarray) -> np.ndarray:
    """(64, 64, 3) uint8: the items on a fresh background."""
    canvas = (_corners() @ rng.uniform(20, 110, (4, 3)).astype(np.float32)).reshape(SIDE, SIDE, 3)
    canvas += 6 * rng.standard_normal((SIDE, SIDE, 1), dtype=np.float32)
    for one in items:
        left, top = one.x - TILE // 2, one.y - TILE // 2
        x0, y0, x1, y1 = max(left, 0), max(top, 0), min(left + TILE, SIDE), min(top + TILE, SIDE)
        opaque = tiles[one.tile][y0 - top : y1 - top, x0 - left : x1 - left, None].astype(np.float32) / 255
        canvas[y0:y1, x0:x1] += opaque * (TINTS[one.colour] + np.float32(one.shade) - canvas[y0:y1, x0:x1])
    return canvas.clip(0, 255).astype(np.uint8)
