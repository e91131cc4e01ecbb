"""Images with boxes: COCO's JSON next to a folder of images, or digits pasted on photos.

A box is xyxy in pixels, x to the right, y down, edges at pixel edges (torchvision's `BoundingBoxes`). Files are converted when
read (COCO has xywh). Every box is stored in its image's own pixels. The net reads a canvas, and `to_own` converts back.
"""

import hashlib
import io
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision import tv_tensors
from torchvision.transforms import v2
from trainworthy.core import UserError
from trainworthy.core.base import seeds
from trainworthy.core.data.validation_split import absolute, refuse_training_data
from trainworthy.core.data.validation_split import parse_val as chosen
from trainworthy.recipes.shared import digits, other_recipes
from trainworthy.recipes.vision.data import pasted
from trainworthy.recipes.vision.data.coco import LAYOUT, checked, of_each, read_list, read_lists
from trainworthy.recipes.vision.data.encoded import Decoded, decode, describe_error, display_path
from trainworthy.recipes.vision.data.pictures import readable, survey

from trainworthy import core


@dataclass
class Source:
    """Which images."""

    path: str = "digits"
    """`digits` (built-in digits on built-in photos), or a folder with COCO's JSON and its images."""
    val: str = ""
    """Validation images: a COCO JSON, a folder with one, or the share to hold out. Default: the folder's own val, else 0.2."""
    scenes: int = 4800
    """Number of training images of `digits`."""
    max_bad: float = 0.01
    """Largest share of missing or unreadable images, and of empty or outside boxes. They are left out (clipped), counted and named; a larger
    share is an error."""

    def __post_init__(self):
        if self.val and self.path == "digits":
            raise UserError("--data.val is for pictures of your own", got=self.val, needed="--data.path FOLDER")
        self.val = absolute(self.val)
        self.path = absolute(self.path, "digits")


NAMED = 10  # classes that a note lists


# ---------------------------------------------------------------------------------------------------------------- pictures
class Annotated(NamedTuple):
    """A data set: images with boxes, and the rows of each split."""

    pictures: Sequence[Tensor]
    """Images, (3, H, W) in 0-255 each."""
    sizes: list[tuple[int, int]]
    """(H, W) of each image."""
    boxes: list[Tensor]
    """Boxes of each image, (k, 4) float32, xyxy in its own pixels; k may be 0."""
    labels: list[Tensor]
    """Labels of each image, (k,) int64, indices into `classes`."""
    classes: tuple[str, ...]
    learn: list[int]
    held_out: list[int]
    notes: dict[str, str]
    """What was left out or converted, for the data report."""
    digests: Sequence[str] = ()
    """Hash of each image file; empty for built-in data."""
    test: Sequence[int] = ()
    """Rows of the test split, which is evaluated once, at the end."""


class Drawn(Sequence):
    """Scenes, rendered when read."""

    def __init__(self, scenes: list[tuple[str, pasted.Scene]]):
        self.scenes = scenes

    def __len__(self) -> int:
        return len(self.scenes)

    def __getitem__(self, row: int) -> Tensor:
        return pasted.render(*self.scenes[row])


class Files(Decoded):
    """Image files."""

    kind = "boxes"

    def name(self, row: int) -> str:
        return display_path(self.files[row], self.root)

    def stamp(self, row: int) -> str:
        try:
            found = self.files[row].stat()
        except OSError:
            return "missing"
        return f"{found.st_size} {found.st_mtime_ns}"

    def _read(self, row: int) -> Tensor:
        return decode(Image.open(self.files[row]))

    def look(self, row: int) -> tuple:
        """Return (problem, image mode, hash of the file, image size)."""
        try:
            data = self.files[row].read_bytes()
            image = Image.open(io.BytesIO(data))
            return "", image.mode, hashlib.blake2b(data, digest_size=12).hexdigest(), list(decode(image).shape[1:])
        except FileNotFoundError:
            return "there is no such file", "", "", []
        except Exception as error:  # decoders raise many types on damaged files
            return describe_error(error), "", "", []


def load(source: Source) -> Annotated:
    """Load the data set. Each is read once per process."""
    return _digits(source.scenes) if source.path == "digits" else _coco(source.path, source.val, source.max_bad)


@cache
def _digits(n: int) -> Annotated:
    numbers = (("train", range(n)), ("val", range(pasted.HELD_OUT)), ("val", pasted.TESTED))
    scenes = [(s, pasted.scene(s, i)) for s, some in numbers for i in some]
    boxes = [torch.tensor([i.box for i in s.items], dtype=torch.float32) for _, s in scenes]
    labels = [torch.tensor([i.digit for i in s.items]) for _, s in scenes]
    sizes = [(pasted.SIDE, pasted.SIDE)] * len(scenes)
    learn, held_out, test = (rows.tolist() for rows in torch.arange(len(scenes)).split([len(s) for _, s in numbers]))
    return Annotated(Drawn(scenes), sizes, boxes, labels, digits.CLASSES, learn, held_out, {}, test=test)


# -------------------------------------------------------------------------------------------------------------------- COCO


@cache
def _coco(where: str, val: str, max_bad: float) -> Annotated:
    """Load a folder. Every image is read once; what was found is cached by file size and modification time."""
    root = Path(where)
    if not root.is_dir():
        raise UserError(f"there is no data folder {where}", got="a file" if root.exists() else "nothing there", needed=LAYOUT,
                        cause=other_recipes.that_read(root, "pictures"), next="--data.path FOLDER, or leave it out for the digits")  # fmt: skip
    lists, wanted = read_lists(root), chosen(val)
    if isinstance(wanted, Path):
        refuse_training_data(wanted, lists[0].file)  # before its pictures are looked for where those of validation are
        lists = [lists[0], read_lists(wanted)[-1] if wanted.is_dir() else read_list(root, wanted, "val")]
        refuse_training_data(lists[1].file, lists[0].file)
    elif wanted:
        lists = lists[:1]
    names = lists[0].names
    for other in lists[1:]:
        if other.names != names:
            differ = [i for i in {*names, *other.names} if names.get(i) != other.names.get(i)]
            raise UserError(f"{lists[0].file.name} and {other.file.name} list other categories", got=f"id {differ[0]} is "
                            f"{names.get(differ[0], 'not there')} and {other.names.get(differ[0], 'not there')}",
                            needed="one list of categories")  # fmt: skip
    ids = sorted(names)
    notes: dict[str, str] = {}
    if crowds := sum(one.crowds for one in lists):
        notes["crowds left out"] = f"{crowds:,} regions"
    files = Files(root, [p for one in lists for p in one.pictures])
    facts = survey(files, len(files), files.look)
    good, left_out = readable(files, facts, where=where, max_bad=max_bad)
    stated_sizes = [s for one in lists for s in one.sizes]
    wrong = [i for i in good.tolist() if tuple(facts[i][3]) != stated_sizes[i]]
    if wrong:
        (h, w), (th, tw) = facts[wrong[0]][3], stated_sizes[wrong[0]]
        raise UserError(f"{len(wrong):,} of {len(good):,} pictures of {where} are not as large as the JSON says",
                        got=f"{files.name(wrong[0])}: {w}x{h}, listed as {tw}x{th}", needed="the sizes that the boxes belong to",
                        cause="the pictures were resized and the boxes were not, or a camera's EXIF tag turns the picture",
                        next="boxes and pictures must be of one size: resize both, or neither")  # fmt: skip
    boxes, labels, start = [], [], 0
    for one in lists:
        found, kept = checked(one, notes, max_bad=max_bad)
        index = torch.searchsorted(torch.tensor(ids), one.categories[kept])
        boxes += of_each(found, one.of[kept], len(one.pictures))
        labels += of_each(index, one.of[kept], len(one.pictures))
        start += len(one.pictures)
    rows, ends, test = good.tolist(), [*accumulate(len(one.pictures) for one in lists)], []
    if len(lists) > 1:
        of = [bisect_right(ends, i) for i in rows]  # index of each row's file
        learn, held_out, test = ([j for j, one in enumerate(of) if one == i] for i in range(3))
    else:
        learn, held_out = _split([facts[i][2] for i in rows], wanted or 0.2)
    pictures = Files(root, [files.files[i] for i in rows])
    boxes, labels = [boxes[i] for i in rows], [labels[i] for i in rows]
    if not any(len(boxes[i]) for i in learn) or not any(len(boxes[i]) for i in held_out):
        raise UserError(f"{where} has no box to {'score' if any(len(boxes[i]) for i in learn) else 'learn from'}",
                        got=f"{len(rows):,} pictures, {sum(map(len, boxes)):,} boxes", needed=LAYOUT)  # fmt: skip
    empty = sum(not len(b) for b in boxes)
    if empty:
        notes["pictures without any object"] = f"{empty:,} of {len(boxes):,}"
    sizes = [tuple(facts[i][3]) for i in rows]
    classes, digests = tuple(names[i] for i in ids), [facts[i][2] for i in rows]
    return Annotated(pictures, sizes, boxes, labels, classes, learn, held_out, left_out | notes, digests, test)


def _split(digests: list[str], share: float) -> tuple[list[int], list[int]]:
    """Hold out a `share`, independent of the run's seed. Copies of an image go to one split."""
    owner = {d: i for i, d in reversed(list(enumerate(digests)))}
    one_each = torch.tensor(sorted(owner.values()))
    drawn = {
        *one_each[seeds.permutation(len(one_each), "boxes", "split")][: max(1, round(len(one_each) * share))].tolist()
    }
    held_out = [i for i, d in enumerate(digests) if owner[d] in drawn]
    return sorted({*range(len(digests))} - {*held_out}), held_out


# ------------------------------------------------------------------------------------------------------------------ samples
def canonical(boxes: Tensor, size: tuple[int, int]) -> tv_tensors.BoundingBoxes:
    """Return xyxy boxes (k, 4) of an image (H, W) as the type that torchvision's transforms move with their image."""
    return tv_tensors.BoundingBoxes(boxes.view(-1, 4), format="XYXY", canvas_size=size)


def ratio(size: Sequence[int], side: int, shorter: int) -> float:
    """Return the pixels of a canvas of `side` per pixel of an image (H, W)."""
    whole = side / max(size)
    return min(whole, shorter / min(size)) if shorter else whole


def counted(labels: Sequence[Tensor], classes: Sequence[str]) -> str:
    """Return how many boxes each class has, and which have none: those cannot be learnt, or not be scored."""
    counts = torch.cat([*labels, torch.tensor([], dtype=torch.long)]).bincount(minlength=len(classes)).tolist()
    ranked = sorted(zip(classes, counts, strict=True), key=lambda one: -one[1])
    some = [f"{name} {n:,}" for name, n in ranked if n]
    none = [name for name, n in ranked if not n]
    shorten = lambda found: ", ".join(found[:NAMED]) + f" and {len(found) - NAMED} more" * (len(found) > NAMED)  # noqa: E731
    return shorten(some) + (f"; none of {shorten(none)}" if none else "")


class Boxed(core.Data):
    """Images on a square canvas of `side` pixels, in its upper left corner, scaled by `ratio`, with their boxes on the canvas (`boxes`) and
    in their own pixels (`truth`). Both are padded with rows of 0 and label -1."""

    shorter = 0
    """Pixels of an image's shorter side, if the longer one then fits; 0: the longer side fills the canvas."""
    fill: Sequence[float] = ()
    """Colour of the rest of the canvas; None: black."""

    def __init__(self, data: Annotated, rows: Sequence[int], *, side: int, augment: nn.Module | None = None):
        self.data, self.rows, self.side, self.augment = data, rows, side, augment
        self.most = max(map(len, data.boxes))
        self.notes = {**data.notes, "boxes": counted([data.labels[i] for i in rows], data.classes)}
        self.fields = {
            "image": core.Field("input", low=0.0, high=1.0),
            "boxes": core.Field("target", low=0.0, high=float(side)),
            "labels": core.Field("target", low=-1, high=len(data.classes) - 1),
        }

    def __len__(self) -> int:
        return len(self.rows)

    def identity(self, index: int) -> str | None:
        return self.data.digests[self.rows[index]] if self.data.digests else None

    def whole(self, row: int) -> tuple[tv_tensors.Image, tv_tensors.BoundingBoxes, Tensor]:
        """Return an image (3, H, W) in [0, 1] with its boxes and labels."""
        picture, size = self.data.pictures[row], self.data.sizes[row]
        return tv_tensors.Image(picture.float() / 255), canonical(self.data.boxes[row], size), self.data.labels[row]

    def get(self, index: int, generator: torch.Generator | None) -> dict[str, Tensor]:
        image, boxes, labels = self.whole(self.rows[index])
        seed = 0
        if generator is not None:
            if self.augment is not None:  # torchvision draws from torch's global generator, seeded per sample
                image, boxes, labels = self.augment(image, boxes, labels)
            seed = int(torch.randint(2**31, (), generator=generator))
        return self.fitted(image, boxes, labels) | {"seed": torch.tensor(seed)}

    def resized(self, h: int, w: int) -> list[int]:
        """Return [height, width] on the canvas."""
        if self.shorter and self.shorter * max(h, w) < self.side * min(h, w):
            return [max(1, round(s * self.shorter / min(h, w))) for s in (h, w)]
        return [max(1, round(s * self.side / max(h, w))) for s in (h, w)]

    def fitted(self, image: Tensor, boxes: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return an image and its boxes on the canvas."""
        h, w = image.shape[-2:]
        to = self.resized(h, w)
        seen, moved = image, boxes
        if to != [h, w]:
            seen, moved = (v2.functional.resize(x, to) for x in (image, boxes))
        more = self.most - len(labels)
        fill = lambda b: F.pad(b.as_subclass(Tensor), (0, 0, 0, more))  # noqa: E731
        canvas = F.pad(seen.as_subclass(Tensor), (0, self.side - to[1], 0, self.side - to[0])).clamp(0, 1)
        if self.fill:
            rest = torch.tensor(self.fill).view(-1, 1)
            canvas[:, to[0] :], canvas[:, :, to[1] :] = rest[..., None], rest[..., None]
        return {
            "image": canvas,
            "boxes": fill(moved), "truth": fill(boxes), "labels": F.pad(labels, (0, more), value=-1),
            "scale": torch.tensor([to[1] / w, to[0] / h]), "size": torch.tensor([h, w]),
        }  # fmt: skip


def targets(batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return the detector's targets, one per image, without padding."""
    rows = zip(batch["boxes"], batch["labels"], batch["seed"], strict=True)
    return [{"boxes": b[y >= 0], "labels": y[y >= 0], "seed": s} for b, y, s in rows]


def to_own(boxes: Tensor, scale: Tensor, size: Tensor) -> Tensor:
    """Convert boxes (k, 4) on a canvas to pixels of the image; `scale` (2,) along x and y, `size` (2,) is H, W."""
    return (boxes / scale.repeat(2)).clamp_min(0).minimum(size.flip(0).repeat(2))
