"""Finds pictures of two splits that show one part of a larger picture: tiles that overlap, crops of one scan. Their pixels are equal, moved
by some rows and columns. Parts that were compressed or resized after they were cut are not found."""

import time
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor
from trainworthy.core.data.contents import compared_fields
from trainworthy.core.recipe.stage import Data

PICTURES = (400, 100)  # of training and validation that are compared
PIXELS = 16_000_000  # of a split that are kept, eight bytes each
SECONDS = 3.0  # that reading those of a split may take
WIDTH, GRID = 16, 8  # pixels of a window in a row, and the distance of windows in training pictures
VARIED = 8  # different pixels that such a window must have
WINDOWS = 4  # that two pictures must share at one distance
PART = 0.1  # of a picture that both must show
TEXTURE = 0.5  # share of that part, and of each of its edges, that is not its commonest pixel: figures on one background may be equal anywhere
LEAST = 0.02  # share of the validation pictures, and two of them


@dataclass
class Shared:
    """Validation pictures of which a part is in a training picture."""

    of: int
    """Validation pictures that were compared."""
    training: int
    pairs: list[tuple[int, int, int, int]]
    """(validation sample, training sample, rows, columns that the part is moved by)."""

    def __str__(self) -> str:
        v, t, rows, columns = self.pairs[0]
        return (f"{len(self.pairs)} of {self.of} validation pictures share a part with one of {self.training} training pictures, pixel by pixel "
                f"(sample {v} is sample {t} moved by {rows} rows and {columns} columns)")  # fmt: skip


def shared(train: Data, val: Data) -> Shared | None:
    """Return the pictures of `val` that share a part with one of `train`; None if the samples are no pictures, or none does."""
    fields = [k for k in compared_fields(train) if k in compared_fields(val)]
    if len(fields) != 1 or len(train) < 2 or not len(val):
        return None
    ours = _read(train, fields[0], PICTURES[0])
    theirs = _read(val, fields[0], PICTURES[1]) if ours else {}
    pairs = []
    table, places = _windows(ours)
    for v, picture in theirs.items():
        if len(table) and (found := _part(picture, ours, table, places)):
            pairs.append((v, *found))
    return Shared(len(theirs), len(ours), pairs) if len(pairs) >= max(2, LEAST * len(theirs)) else None


def _read(data: Data, key: str, most: int) -> dict[int, Tensor]:
    """Return some pictures by their index, (H, W) with one number for each pixel, evenly spaced; empty if they are no pictures."""
    found: dict[int, Tensor] = {}
    began, step = time.process_time(), -(-len(data) // most)
    for i in range(0, len(data), step):
        x = data.get(i, None)[key]
        if not isinstance(x, Tensor) or x.ndim != 3 or min(x.shape[1:]) < 2 * WIDTH:
            return {}
        found[i] = _mixed(torch.round(x.double() * 2**16).long())
        if time.process_time() - began > SECONDS or sum(p.numel() for p in found.values()) > PIXELS:
            break
    return found


def _mixed(channels: Tensor) -> Tensor:
    """Return one number (H, W) for the channels (C, H, W) of each pixel."""
    out = torch.zeros_like(channels[0])
    for one in channels:
        out = (out ^ one) * 0x100000001B3
        out = out ^ (out >> 29)
    return out


def _rows(picture: Tensor) -> Tensor:
    """Return a number (H, W - WIDTH + 1) for the window that begins at each pixel."""
    columns = picture.shape[1] - WIDTH + 1
    out = torch.zeros_like(picture[:, :columns])
    for k in range(WIDTH):
        out = out * 0x5851F42D4C957F2D + picture[:, k : k + columns]
    return out


def _windows(pictures: dict[int, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the windows on a grid of the pictures, sorted, (N,), and (sample, row, column) of each, (N, 3). Those of few values, and those
    that a picture has twice (stripes, gradients), are left out."""
    numbers, places = [], []
    for i, picture in pictures.items():
        some = _rows(picture)[::GRID, ::GRID]
        y, x = (g.flatten() for g in torch.meshgrid(*(GRID * torch.arange(n) for n in some.shape), indexing="ij"))
        values = picture.unfold(1, WIDTH, 1)[::GRID, ::GRID].flatten(0, 1).sort(-1).values
        varied = (values.diff(dim=-1) != 0).sum(-1) + 1 >= VARIED
        _, which, times = some.flatten().unique(return_inverse=True, return_counts=True)
        varied &= times[which] == 1
        numbers.append(some.flatten()[varied])
        places.append(torch.stack([torch.full_like(y, i), y, x], 1)[varied])
    if not numbers:
        return torch.zeros(0), torch.zeros(0, 3)
    every, where = torch.cat(numbers), torch.cat(places)
    order = every.argsort()
    return every[order], where[order]


def _part(picture: Tensor, pictures: dict[int, Tensor], table: Tensor, places: Tensor) -> tuple[int, int, int] | None:
    """Return (training sample, rows, columns) of the one that shows most of `picture`."""
    windows = _rows(picture)
    at = torch.searchsorted(table, windows.flatten()).clamp_max(len(table) - 1)
    hits = (table[at] == windows.flatten()).nonzero().flatten()
    y, x = hits // windows.shape[1], hits % windows.shape[1]
    moved = torch.stack([places[at[hits], 0], places[at[hits], 1] - y, places[at[hits], 2] - x], 1)
    for (sample, dy, dx), n in Counter(map(tuple, moved.tolist())).most_common(4):
        if n < WINDOWS:
            break
        if (dy or dx) and _equal(picture, pictures[sample], dy, dx):
            return sample, dy, dx
    return None


def _equal(a: Tensor, b: Tensor, dy: int, dx: int) -> bool:
    """Return whether `a` is `b` moved by (dy, dx), wherever both have pixels."""
    (ay, by), (ax, bx) = (
        _both(d, *sizes) for d, sizes in zip((dy, dx), zip(a.shape, b.shape, strict=True), strict=True)
    )
    one, other = a[ay, ax], b[by, bx]
    if one.numel() < PART * a.numel() or not torch.equal(one, other):
        return False
    values, times = one.unique(return_counts=True)
    background = values[times.argmax()]
    return all(
        (some != background).double().mean() >= TEXTURE for some in (one, one[0], one[-1], one[:, 0], one[:, -1])
    )


def _both(d: int, a: int, b: int) -> tuple[slice, slice]:
    """Return the places of `a` and of `b` that meet if place i of `a` is place i + d of `b`."""
    start, end = max(0, -d), min(a, b - d)
    return slice(start, end), slice(start + d, end + d)
