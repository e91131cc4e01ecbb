"""Digits pasted on photos, 96x96: two to four real handwritten digits of 22 to 40 pixels on a crop of a real photo, with exact boxes. Digits
and photos are split into train and val first; a scene is a function of its number."""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from trainworthy.recipes.shared import photos
from trainworthy.recipes.shared.composites import COLOURS, TINTS, generator, pool

SIDE, FEWEST, MOST = 96, 2, 4
HEIGHTS, INK = (22, 40), 64  # pixels; grey level from which a pixel is ink, of 255
EDGE = (0.1, 0.5)  # opacity from which a pixel no longer belongs to the photo, and from which it belongs to the digit
HELD_OUT = 500  # validation scenes
# Test scenes: other compositions of the same held-out digits and photos, since there are no others
TESTED = range(HELD_OUT, 2 * HELD_OUT)
WINDOW = (96, 200)  # side in pixels of a photo's crop before it is reduced to SIDE
TRIES = 20  # random positions to try for a digit; without a free one it is left out


class Pasted(NamedTuple):
    """One digit of a scene."""

    digit: int
    tile: int
    """Index of the digit's picture in the pool."""
    colour: tuple[float, float, float]
    box: tuple[int, int, int, int]
    """x0, y0, x1, y1: pixel edges of its ink."""


class Scene(NamedTuple):
    """Description of a scene before it is rendered."""

    photo: int
    crop: tuple[int, int, int, int]
    items: tuple[Pasted, ...]


@cache
def inked(split: str, tile: int) -> Image.Image:
    """Return a digit cropped to its ink, grey."""
    image = pool(split).tiles[tile]
    rows, columns = (np.flatnonzero((image > INK).any(axis)) for axis in (1, 0))
    return Image.fromarray(image[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1])


@cache
def scene(split: str, index: int) -> Scene:
    """Return scene number `index`."""
    rng = generator("pasted", split, index)
    backgrounds = photos.load(split)
    photo = int(rng.integers(len(backgrounds)))
    h, w = backgrounds[photo].shape[:2]
    side = int(rng.integers(*WINDOW))
    left, top = int(rng.integers(w - side + 1)), int(rng.integers(h - side + 1))
    items: list[Pasted] = []
    for _ in range(int(rng.integers(FEWEST, MOST + 1))):
        digit, high = int(rng.integers(10)), int(rng.integers(HEIGHTS[0], HEIGHTS[1] + 1))
        tile = int(rng.choice(pool(split).of[digit]))
        ink = inked(split, tile)
        wide = max(6, round(high * ink.width / ink.height))
        tint = TINTS[rng.integers(len(COLOURS))] + rng.normal(0, 15, 3)
        for x, y in rng.integers((0, 0), (SIDE - wide + 1, SIDE - high + 1), (TRIES, 2)).tolist():
            box = (x, y, x + wide, y + high)
            if all(x >= o[2] or o[0] >= box[2] or y >= o[3] or o[1] >= box[3] for o in (i.box for i in items)):
                items.append(Pasted(digit, tile, tuple(tint.tolist()), box))
                break
    return Scene(photo, (left, top, left + side, top + side), tuple(items))


def render(split: str, found: Scene) -> Tensor:
    """Render a scene, (3, 96, 96) uint8."""
    background = Image.fromarray(photos.load(split)[found.photo]).resize(
        (SIDE, SIDE), Image.Resampling.BILINEAR, found.crop
    )
    canvas = np.array(background, dtype=np.float32)
    for one in found.items:
        x0, y0, x1, y1 = one.box
        part = canvas[y0:y1, x0:x1]
        part += opacity(split, one)[..., None] * (np.float32(one.colour) - part)
    return torch.from_numpy(canvas.clip(0, 255).astype(np.uint8)).permute(2, 0, 1)


def opacity(split: str, one: Pasted) -> np.ndarray:
    """Return the digit's opacity in its box, (h, w) in [0, 1]."""
    x0, y0, x1, y1 = one.box
    return np.asarray(inked(split, one.tile).resize((x1 - x0, y1 - y0), Image.Resampling.BILINEAR), np.float32) / 255


def ids(split: str, found: Scene, *, void: int) -> Tensor:
    """Return the mask (96, 96) uint8: 0 for the photo, digit + 1, and `void` along edges, where both are blended."""
    mask = np.zeros((SIDE, SIDE), np.uint8)
    for one in found.items:
        x0, y0, x1, y1 = one.box
        part, ink = mask[y0:y1, x0:x1], opacity(split, one)
        part[ink > EDGE[0]] = void
        part[ink >= EDGE[1]] = one.digit + 1
    return torch.from_numpy(mask)


# --------------------------------------------------------------------------------------------------------------- by hand
# Side in pixels of the classifier's input; saturation from which a pixel belongs to a digit.
SEEN, THRESHOLDS = 20, (40, 60, 80, 100, 120, 140)


def by_hand(scenes: Sequence[tuple[str, Scene]], threshold: int) -> tuple[Tensor, Tensor]:
    """Detect without a neural net: ((N, 7) picture, label, score, box; (len(scenes), 96, 96) uint8, 0 or label + 1). Connected saturated
    pixels are digits; logistic regression, trained on the training digits, classifies them."""
    from scipy import ndimage

    reader, found, masks = _reader(), [], torch.zeros(len(scenes), SIDE, SIDE, dtype=torch.uint8)
    for i, one in enumerate(scenes):
        picture = render(*one).numpy().astype(np.float32)
        vivid = picture.max(0) - picture.min(0)
        areas, _ = ndimage.label(vivid > threshold, np.ones((3, 3)))
        for n, (rows, columns) in enumerate(ndimage.find_objects(areas), 1):
            box = (columns.start, rows.start, columns.stop, rows.stop)
            if rows.stop - rows.start < HEIGHTS[0] / 2 or rows.stop - rows.start > 1.2 * HEIGHTS[1]:
                continue
            mine = areas[rows, columns] == n
            ink = Image.fromarray((mine * 255).astype(np.uint8)).resize((SEEN, SEEN))
            p = reader.predict_proba(np.asarray(ink).reshape(1, -1) / 255)[0]
            found.append([i, int(p.argmax()), float(p.max()), *box])
            masks[i, rows, columns][torch.from_numpy(mine)] = int(p.argmax()) + 1
    return torch.tensor(found, dtype=torch.float32).view(-1, 7), masks


@cache
def _reader() -> object:
    from sklearn.linear_model import LogisticRegression

    tiles = [(t, d) for d, of in enumerate(pool("train").of) for t in of]
    ink = [np.asarray(inked("train", t).resize((SEEN, SEEN))).reshape(-1) / 255 for t, _ in tiles]
    return LogisticRegression(C=0.1, max_iter=300).fit(np.array(ink), [d for _, d in tiles])
