"""Images with masks of class ids, from a folder or a built-in data set, read in windows of one size.

A mask is a PNG as large as its image whose values are class ids (grey or palette, 8 or 16 bits). `IGNORE` marks void pixels: they have
no class and count neither in the loss nor in the metric. Padding is void. So are pixels that another window scores.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision import tv_tensors
from torchvision.transforms import v2
from trainworthy.core import UserError
from trainworthy.core.base import seeds
from trainworthy.core.data.validation_split import absolute, refuse_training_data
from trainworthy.core.data.validation_split import parse_val as chosen
from trainworthy.recipes.shared import digits, nuclei, other_recipes
from trainworthy.recipes.vision.data import pasted
from trainworthy.recipes.vision.data.mask_files import IGNORE, LAYOUT, Pair, Pairs, class_names, matched
from trainworthy.recipes.vision.data.pictures import VALIDATION, readable, survey

from trainworthy import core

QUESTIONS = {"nuclei": "which pixels are nuclei?", "digits": "which pixels belong to which digit?"}
EMBEDDED = tuple(QUESTIONS)


@dataclass
class Source:
    """Which pictures."""

    path: str = "nuclei"
    """`nuclei` or `digits` (pasted on photos), which are built in, or a folder that has images/ and masks/ with files of equal names,
    or train/ and val/ with both. `classes.txt` in that folder names the class ids, one per line, from 0."""
    val: str = ""
    """Validation images: a folder with images/ and masks/, or the share to hold out. Default: the folder's own val, else 0.2."""
    scenes: int = 4800
    """Number of training images of `digits`."""
    max_bad: float = 0.01
    """Largest share of unreadable images or masks. They are left out, counted and named; a larger share is an error."""

    def __post_init__(self):
        if self.val and self.path in EMBEDDED:
            raise UserError("--data.val is for pictures of your own", got=self.val, needed="--data.path FOLDER")
        self.val = absolute(self.val)
        self.path = absolute(self.path, *EMBEDDED)


# ------------------------------------------------------------------------------------------------------------------ pairs


class Annotated(NamedTuple):
    """A data set: images with masks, and the rows of each split."""

    pairs: Sequence[Pair]
    sizes: list[tuple[int, int]]
    """(H, W) of each."""
    pixels: Tensor
    """Number of pixels of each value in each mask, (N, 256) int64."""
    classes: tuple[str, ...]
    learn: list[int]
    held_out: list[int]
    notes: dict[str, str]
    """What was left out or converted, for the data report."""
    digests: Sequence[str] = ()
    """Hash of each image file; empty for built-in data."""
    test: Sequence[int] = ()
    """Rows of the test split, which is evaluated once, at the end."""


def load(source: Source) -> Annotated:
    """Load the data set. Each is read once per process."""
    if source.path in EMBEDDED:
        return _nuclei() if source.path == "nuclei" else _digits(source.scenes)
    return _folder(source.path, source.val, source.max_bad)


@cache
def _nuclei() -> Annotated:
    picture, mask = nuclei.load()
    parts = [slice(nuclei.LEARN), slice(nuclei.LEARN, None)]
    pairs = [(picture[None, :, p], mask[:, p]) for p in parts]
    pixels = torch.stack([m.flatten().bincount(minlength=256) for _, m in pairs])
    return Annotated(pairs, [tuple(m.shape) for _, m in pairs], pixels, nuclei.CLASSES, [0], [1], {})


class Composed(Sequence):
    """Digits pasted on photos, rendered when a row is read, and their masks."""

    def __init__(self, scenes: list[tuple[str, pasted.Scene]]):
        self.scenes, self.masks = scenes, [pasted.ids(*s, void=IGNORE) for s in scenes]

    def __len__(self) -> int:
        return len(self.scenes)

    def __getitem__(self, row: int) -> Pair:
        return pasted.render(*self.scenes[row]), self.masks[row]


@cache
def _digits(n: int) -> Annotated:
    numbers = (("train", range(n)), ("val", range(pasted.HELD_OUT)), ("val", pasted.TESTED))
    pairs = Composed([(s, pasted.scene(s, i)) for s, some in numbers for i in some])
    pixels = torch.stack([m.flatten().bincount(minlength=256) for m in pairs.masks])
    learn, held_out, test = (rows.tolist() for rows in torch.arange(len(pairs)).split([len(s) for _, s in numbers]))
    sizes, classes = [(pasted.SIDE, pasted.SIDE)] * len(pairs), ("background", *digits.CLASSES)
    return Annotated(pairs, sizes, pixels, classes, learn, held_out, {}, test=test)


@cache
def _folder(where: str, val: str, max_bad: float) -> Annotated:
    """Load images and masks of equal names. Every file is read once; what was found is cached by file size and modification time."""
    root = Path(where)
    if not root.is_dir():
        raise UserError(f"there is no data folder {where}", got="a file" if root.exists() else "nothing there", needed=LAYOUT,
                        cause=other_recipes.that_read(root, "pictures"), next="--data.path FOLDER, or leave it out for the nuclei")  # fmt: skip
    train = root / "train" if (root / "train").is_dir() else root
    wanted = chosen(val)
    own = next((root / v for v in VALIDATION if (root / v).is_dir()), None) if train != root else None
    val = own if wanted is None else wanted if isinstance(wanted, Path) else None
    if val:
        refuse_training_data(val, train)
    test = root / "test" if own and own.name != "test" and (root / "test" / "masks").is_dir() else None
    notes: dict[str, str] = {}
    files = [matched(split, notes) for split in (train, val, test) if split]
    pairs = Pairs(root, [f for found in files for f in found])
    facts = survey(pairs, len(pairs), pairs.look)
    good, left_out = readable(pairs, facts, where=where, max_bad=max_bad)
    ends = [*accumulate(map(len, files))]
    of = [bisect_right(ends, i) for i in good.tolist()]  # index of each row's split
    pairs, facts = Pairs(root, [pairs.files[i] for i in good]), [facts[i] for i in good]
    wrong = [i for i, fact in enumerate(facts) if fact[3] != fact[4]]
    if wrong:
        (h, w), (mh, mw) = facts[wrong[0]][3:5]
        raise UserError(f"{len(wrong):,} of {len(facts):,} masks of {where} are not as large as their pictures",
                        got=f"{pairs.name(wrong[0])}: {w}x{h}, its mask {mw}x{mh}", needed="equal sizes, pixel for pixel",
                        cause="one of the two was resized or turned (a camera's EXIF tag turns the picture, not its mask)",
                        next="write masks at their picture's size; resize ids by nearest neighbour only")  # fmt: skip
    pixels = torch.zeros(len(facts), 256, dtype=torch.long)
    for row, fact in zip(pixels, facts, strict=True):
        row[[int(v) for v in fact[5]]] = torch.tensor(list(fact[5].values()))
    classes = class_names(root, pixels, pairs)
    if val is None:
        owner = {fact[2]: i for i, fact in reversed(list(enumerate(facts)))}  # copies of an image go to one split
        one_each = torch.tensor(sorted(owner.values()))
        drawn = one_each[seeds.permutation(len(one_each), "masks", "split")][
            : max(1, round(len(one_each) * (wanted or 0.2)))
        ]
        held_out = [i for i, fact in enumerate(facts) if owner[fact[2]] in drawn.tolist()]
    else:
        held_out = [i for i, split in enumerate(of) if split == 1]
    tested = [i for i, split in enumerate(of) if split == (2 if val else 1)]
    learn = sorted({*range(len(facts))} - {*held_out, *tested})
    if not learn or not held_out:
        raise UserError(f"{where} has no picture to {'score on' if learn else 'learn from'}", got=f"{len(facts)} in all",
                        needed=LAYOUT)  # fmt: skip
    sizes, digests = [tuple(f[3]) for f in facts], [f[2] for f in facts]
    return Annotated(pairs, sizes, pixels, classes, learn, held_out, left_out | notes, digests, tested)


# ---------------------------------------------------------------------------------------------------------------- windows
def starts(length: int, window: int, step: int) -> list[int]:
    """Return the start of each window, at most `step` apart. The last window ends at the border of the image."""
    return [*range(0, max(length - window, 0), step), max(length - window, 0)]


def owned(places: list[int], i: int, window: int, length: int) -> tuple[int, int]:
    """Return the interval that window `i` scores: it ends in the middle of the overlap with each neighbour."""
    low = 0 if i == 0 else (places[i - 1] + window + places[i]) // 2
    high = max(length, window) if i + 1 == len(places) else (places[i] + window + places[i + 1]) // 2
    return low - places[i], high - places[i]


def covered(low: int, high: int, length: int, resized: int) -> range:
    """Return the stored pixels, of `length`, whose centres are in pixels `low` to `high` of the image after resizing to `resized`."""
    first, last = (-((resized - 2 * edge * length) // (2 * resized)) for edge in (low, min(high, resized)))
    return range(first, last)


def shares(pixels: Tensor, classes: Sequence[str], most: int = 10) -> str:
    """Return the share of each class, largest first, and of void, of `pixels` (256,): "cell 62%, background 37%, void 0.9%"."""
    named = {
        **{f"class {name}" if name.isdigit() else name: pixels[c].item() for c, name in enumerate(classes)},
        "void": pixels[IGNORE].item(),
    }
    total = pixels.sum().item()
    ranked = sorted(((name, n / total) for name, n in named.items() if n), key=lambda x: -x[1])
    more = [f"{len(ranked) - most} more"] if len(ranked) > most else []
    return ", ".join(
        [f"{name} {share:.2%}" if share < 0.01 else f"{name} {share:.0%}" for name, share in ranked[:most]] + more
    )


class Windows(core.Data):
    """Windows that cover every image: images (C, window, window) in [0, 1], masks (window, window) int64.

    In evaluation each pixel is scored in one window, the one in which it is farthest from the border, and is ignored in the others. Counts
    over windows are therefore counts over images. In training `augment` draws a random window of the same image.

    If images are resized, evaluation samples also have `stored`: the stored ids (h, w) that this window scores, with `stored_y` (h,) and
    `stored_x` (w,), their positions in the window's pixels. In a batch these are lists.
    """

    def __init__(self, data: Annotated, rows: list[int], *, window: int, step: int, resize: int = 0,
                 augment: nn.Module | None = None):  # fmt: skip
        self.pairs, self.window, self.resize, self.augment = data.pairs, window, resize, augment
        self.digests, self.stored_sizes, self.classes = data.digests, data.sizes, data.classes
        self.sizes = {i: self.fitted(data.sizes[i]) for i in rows}
        self.places = []
        for i, (h, w) in self.sizes.items():
            down, right = starts(h, window, step), starts(w, window, step)
            for y, top in enumerate(down):
                for x, left in enumerate(right):
                    self.places.append((i, top, left, owned(down, y, window, h), owned(right, x, window, w)))
        self.notes = {
            **data.notes,
            "samples": f"windows of {window} x {window} pixels, {len(self.places):,} from {len(rows):,} pictures; "
            "a pixel is scored in one window and ignored in the others",
            "pixels": shares(data.pixels[rows].sum(0), data.classes),
        }
        if small := sum(min(size) < window for size in self.sizes.values()):
            self.notes[f"padded to {window} pixels, the padding void"] = f"{small:,} of {len(rows):,} pictures"
        self.fields = {
            "image": core.Field("input", low=0.0, high=1.0),
            "mask": core.Field("target", low=0, high=IGNORE),
        }

    def __len__(self) -> int:
        return len(self.places)

    def identity(self, index: int) -> str | None:
        row, top, left, *_ = self.places[index]
        return f"{self.digests[row]} {top} {left}" if self.digests else None

    def fitted(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return (H, W) with `resize` pixels on the shorter side; unchanged if `resize` is 0."""
        return tuple(max(1, round(s * self.resize / min(size))) for s in size) if self.resize else size

    def whole(self, row: int, pair: Pair | None = None) -> tuple[tv_tensors.Image, tv_tensors.Mask]:
        """Return an image (C, H, W) in [0, 1] and its mask, resized together; ids by nearest neighbour. `pair`: if it is read already."""
        picture, mask = self.pairs[row] if pair is None else pair
        image, mask = tv_tensors.Image(picture.float() / 255), tv_tensors.Mask(mask)
        if self.resize:
            image, mask = (v2.functional.resize(x, list(self.sizes[row])) for x in (image, mask))
        return image, mask

    def cut(self, index: int, image: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return window `index` of an image and its mask. Pixels that other windows score, and padding, are void."""
        _, top, left, (t, b), (lo, hi) = self.places[index]
        window = slice(top, top + self.window), slice(left, left + self.window)
        image, mask = image[:, *window], mask[window]
        missing = (0, self.window - mask.shape[1], 0, self.window - mask.shape[0])
        image, mask = F.pad(image, missing), F.pad(mask, missing, value=IGNORE)
        own = torch.full_like(mask, IGNORE)
        own[t:b, lo:hi] = mask[t:b, lo:hi]
        return image, own

    def get(self, index: int, generator: torch.Generator | None) -> dict[str, Tensor]:
        row = self.places[index][0]
        pair = self.pairs[row]
        image, mask = self.whole(row, pair)
        if generator is not None and self.augment is not None:
            # Torchvision draws from torch's global generator, seeded per sample.
            image, mask = self.augment(image, mask)
            return {"image": image.as_subclass(Tensor), "mask": mask.as_subclass(Tensor).long()}
        image, mask = self.cut(index, image, mask)
        sample = {"image": image.as_subclass(Tensor), "mask": mask.as_subclass(Tensor).long()}
        return {**sample, **self.stored(index, pair[1])} if self.resize and generator is None else sample

    def stored(self, index: int, mask: Tensor) -> dict[str, Tensor]:
        """Return the part of a stored mask that window `index` scores, and where its pixels are in the window."""
        row, *start, down, right = self.places[index]
        parts, at = [], []
        axes = zip(start, (down, right), self.stored_sizes[row], self.sizes[row], strict=True)
        for begin, (low, high), length, resized in axes:
            pixels = covered(begin + low, begin + high, length, resized)
            position = (torch.arange(pixels.start, pixels.stop) + 0.5) * (resized / length) - 0.5 - begin
            parts.append(slice(pixels.start, pixels.stop))
            at.append(position.clamp(0, min(self.window, resized - begin) - 1))
        return {"stored": mask[tuple(parts)], "stored_y": at[0], "stored_x": at[1]}

    def collate(self, samples: list[dict[str, Tensor]]) -> dict[str, Any]:
        lists = {k: [s[k] for s in samples] for k in samples[0] if k.startswith("stored")}
        return super().collate([{k: v for k, v in s.items() if k not in lists} for s in samples]) | lists
