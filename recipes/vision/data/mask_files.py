"""Files of masks: which picture each belongs to, its class ids, and the names of the classes."""

import hashlib
import io
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from trainworthy.core import UserError
from trainworthy.recipes.shared import mds, other_recipes
from trainworthy.recipes.vision.data.encoded import Decoded, decode, describe_error, display_path

IGNORE = 255
"""Id of void pixels, for the loss, the metric, padding and augmentation."""
LAYOUT = "FOLDER/train/images and FOLDER/train/masks (and the same in val), or FOLDER/images and FOLDER/masks; FOLDER/classes.txt"
Pair = tuple[Tensor, Tensor]  # picture (C, H, W) of 0-255, mask (H, W) uint8


def ids(image: Image.Image) -> Tensor:
    """Return the class ids of a mask, (H, W) uint8. Raises ValueError if its values cannot be class ids."""
    if image.mode not in ("1", "L", "P", "I", "I;16", "I;16B"):
        raise ValueError(
            f"colours ({image.mode}), where one number a pixel is needed: its class id, grey or as a palette"
        )
    values = np.asarray(image)  # of a palette image, the indices
    if values.max() > IGNORE:
        raise ValueError(
            f"values up to {values.max()}: instance numbers, or depth; class ids are 0 to 254, {IGNORE} is void"
        )
    return torch.from_numpy(values.astype(np.uint8))


class Pairs(Decoded):
    """Image files with their masks, decoded when a row is read."""

    kind, beside, needed = "masks", " or its mask", "a picture and a mask"

    def name(self, row: int) -> str:
        return display_path(self.files[row][0], self.root)

    def stamp(self, row: int) -> str:
        return " ".join(f"{f.stat().st_size} {f.stat().st_mtime_ns}" for f in self.files[row])

    def _read(self, row: int) -> Pair:
        picture, mask = self.files[row]
        return decode(Image.open(picture)), ids(Image.open(mask))

    def look(self, row: int) -> tuple:
        """Return (problem, image mode, hash of the image file, image size, mask size, pixels of each value of the mask)."""
        try:
            data = self.files[row][0].read_bytes()
            image = Image.open(io.BytesIO(data))
            kind, digest = image.mode, hashlib.blake2b(data, digest_size=12).hexdigest()
            picture = decode(image)
        except Exception as error:  # decoders raise many types on damaged files
            return describe_error(error), "", "", [], [], {}
        try:
            mask = ids(Image.open(self.files[row][1]))
        except Exception as error:
            return f"its mask: {describe_error(error)}", kind, digest, [], [], {}
        values, counts = mask.unique(return_counts=True)
        found = dict(zip(map(str, values.tolist()), counts.tolist(), strict=True))
        return "", kind, digest, list(picture.shape[1:]), list(mask.shape), found


def matched(split: Path, notes: dict[str, str]) -> list[tuple[Path, Path]]:
    """Return (image, mask) paths. An image without a mask is an error; a mask without an image is a note."""
    inside = lambda name: sorted(p for p in (split / name).glob("*") if p.is_file() and not p.name.startswith("."))  # noqa: E731
    pictures, masks = inside("images"), {p.stem: p for p in inside("masks")}
    alone = [p.name for p in pictures if p.stem not in masks]
    if not pictures:
        mds.refuse(split, needed=LAYOUT, pictures=True)
        raise UserError(f"no picture in {split / 'images'}", needed=LAYOUT,
                        got=", ".join(sorted(p.name for p in split.iterdir())[:5]) or "nothing",
                        cause=other_recipes.that_read(split, "pictures") or "the path stops one folder too early or too late")  # fmt: skip
    if alone:
        raise UserError(f"{len(alone):,} of {len(pictures):,} pictures in {split} have no mask",
                        got=", ".join(alone[:5]) + (", ..." if len(alone) > 5 else ""), needed=f"{split / 'masks'}/<name>.png",
                        cause="a mask has its picture's name; a picture without any object has a mask of 0 everywhere",
                        next="write those masks, or move the pictures away")  # fmt: skip
    spare = sorted(masks.keys() - {p.stem for p in pictures})
    if spare:
        notes[f"masks without a picture in {split.name}"] = f"{len(spare):,}: {', '.join(spare[:5])}"
    return [(p, masks[p.stem]) for p in pictures]


def class_names(root: Path, pixels: Tensor, pairs: Pairs) -> tuple[str, ...]:
    """Return the class names: those of classes.txt, else the ids as numbers. Raises UserError for values that are neither an id nor void."""
    seen = [v for v in pixels.sum(0).nonzero().flatten().tolist() if v != IGNORE]
    file = root / "classes.txt"
    lines = file.read_text(encoding="utf-8-sig").splitlines() if file.exists() else []
    classes = tuple(n.strip() for n in lines if n.strip())
    n = len(classes)
    beyond = [v for v in seen if v >= n] if classes else []
    if beyond:
        odd = int(pixels[:, beyond].sum(1).nonzero()[0])
        lossy = [p for _, p in pairs.files if p.suffix.lower() in (".jpg", ".jpeg")]
        display_path = ", ".join(f"{v} ({int(pixels[:, v].sum()):,} pixels)" for v in beyond[:5]) + (
            ", ..." if len(beyond) > 5 else ""
        )
        raise UserError(f"masks of {root} have ids that are not class ids", got=f"{display_path}, first in the mask of {pairs.name(odd)}",
                        needed=f"0 to {n - 1} ({', '.join(classes[:5])}{', ...' if n > 5 else ''}), or {IGNORE} for void",
                        cause=f"JPEG changes the ids at outlines: {len(lossy):,} masks are JPEG files" if lossy else
                        "ids that count from 1" if beyond == [n] and 0 not in seen else
                        "instance masks (a number for each object), grey levels for ids, or another list of classes",
                        next="write the masks again as PNG" if lossy else f"write class ids, or list every class in {file}")  # fmt: skip
    if not classes and numbered(pixels, pairs):
        raise UserError(f"masks of {root} number objects, they do not name classes",
                        got=f"values up to {max(seen)}, each in one piece", needed="class ids, the same for every object of a kind",
                        cause="instance masks, or areas counted by a labelling tool",
                        next=f"write the object's class for its number; where they are classes, name them in {file}")  # fmt: skip
    classes = classes or tuple(map(str, range(max(seen, default=0) + 1)))
    if len(classes) < 2 or len(classes) > IGNORE:
        raise UserError(f"{root} has {len(classes)} classes", got=f"values {', '.join(map(str, seen[:5])) or 'none but void'}",
                        needed=f"2 to {IGNORE}, the background counted", next=f"name them line by line in {file}")  # fmt: skip
    return classes


def numbered(pixels: Tensor, pairs: Pairs, look: int = 20) -> bool:
    """Return whether masks number objects instead of naming classes.

    True if every value forms one connected piece in 95% of the cases, and either the median mask has at least ten values, or values
    count up from 1 without gaps and their number differs between masks. Looks at the first `look` masks that are not empty."""
    from scipy import ndimage

    some = (pixels[:, 1:IGNORE].sum(1) > 0).nonzero().flatten()[:look].tolist()
    each = [(pixels[i, 1:IGNORE] > 0).nonzero().flatten() + 1 for i in some]
    most = sorted(map(len, each))
    counted_up = sum(torch.equal(v, torch.arange(1, len(v) + 1)) for v in each) >= 0.95 * len(each)
    if not each or not (most[len(most) // 2] >= 10 or (counted_up and most[0] < most[-1] and most[-1] >= 5)):
        return False
    masks = [pairs[i][1].numpy() for i in some]
    pieces = [
        ndimage.label(m == v, np.ones((3, 3)))[1]
        for m, values in zip(masks, each, strict=True)
        for v in values.tolist()
    ]
    return sum(n == 1 for n in pieces) >= 0.95 * len(pieces)
