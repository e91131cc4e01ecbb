"""Finds an augmentation that makes one class look like another: digits that are turned by any angle, where a 6 becomes a 9.

A change of a picture (a half turn, a mirror) exchanges two classes if most pictures of each, changed so, are nearest to one of the other,
compared with equally many samples of both.
The training path is then drawn from: does it make that change and keep the label?

Where samples are generated, a change that the training path makes is learnt, and generated: mirrored digits. It is a fault if the data do not
have it: if most pictures, changed so, are less like the other pictures than they were.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from trainworthy.core.data import inventory
from trainworthy.core.data.alike import nearest, pooled
from trainworthy.core.data.contents import compared_fields
from trainworthy.core.data.loader import Keyed
from trainworthy.core.recipe.stage import Data

Change = Callable[[Tensor], Tensor]
CHANGES: dict[str, Change] = {
    "turned by half": lambda x: x.flip(-2, -1),
    "mirrored": lambda x: x.flip(-1),
    "upside down": lambda x: x.flip(-2),
    "turned by a quarter": lambda x: x.rot90(1, (-2, -1)),
    "turned by three quarters": lambda x: x.rot90(3, (-2, -1)),
}
PAIRS, ITSELF = 64, 0.1
"""Draws that are compared with their pictures; share of them that are most like these as they are."""
ROWS, LEAST = 2000, 20  # samples that are compared; of either class there must be so many
PLACED = 0.1  # of the samples no longer nearest to their own class in the middle: classes differ in where something is
KNOWN = 0.9  # share of a class that must be nearest to its own kind as it is
# Share of either class that must be nearest to the other when it is changed, and the mean of both
EXCHANGED, MEAN = 0.4, 0.6
FOREIGN = 0.75  # share of the pictures that are less like the others when they are changed
# Cosine of a draw with the changed picture, and by how much it must be above that with the picture
SAME, CLEAR = 0.8, 0.1
DRAWS, MADE = 400, 0.06  # draws of the training path for either class; the share of them that must show the change


@dataclass
class Exchanged:
    """Two classes that the training path makes look alike."""

    change: str
    classes: tuple[str, str]
    alike: tuple[float, float]
    """Share of each class that is nearest to the other when it is changed."""
    made: tuple[float, float]
    """Share of the draws of each class in which the training path makes the change."""

    def words(self) -> str:
        a, b = self.classes
        return (f"'{a}' {self.change} is nearest to a '{b}' in {self.alike[0]:.0%} of the samples, '{b}' to a '{a}' in {self.alike[1]:.0%}; "
                f"the training path makes that change in {self.made[0]:.0%} and {self.made[1]:.0%} of its draws and keeps the label")  # fmt: skip

    def cause(self) -> str:
        a, b = self.classes
        return f"the augmentation makes one class look like another: '{a}' {self.change} is '{b}'; leave this change out of the training path"


@dataclass
class Foreign:
    """A change that the training path makes and the data do not have."""

    change: str
    less: float
    """Share of the pictures that are less like the others when they are changed."""
    made: float
    """Share of the draws in which the training path makes the change."""

    def words(self) -> str:
        return (f"the training path has pictures {self.change} in {self.made:.0%} of its draws; {self.less:.0%} of the pictures are less like "
                "the others when they are changed so")  # fmt: skip

    def cause(self) -> str:
        return f"the augmentation makes pictures ({self.change}) that are not in the data, and the model learns to generate them"


@dataclass
class Pictures:
    """Some samples of a split, as a scan keeps them."""

    contents: Tensor
    """(N, C, H, W), smoothed, of zero mean and unit norm, each moved by `place`."""
    labels: Tensor
    indices: list[int]
    classes: list[str]
    input: str
    target: str
    place: Change
    """What is done to every picture before it is compared: `_middle`, or nothing where classes differ in where something is."""

    def nearest(self, pictures: Tensor, *, own: bool, most: int = 0) -> Tensor:
        """Return the class of the sample that is nearest to each picture; `own`: row i of both is one sample and does not count. `most`:
        samples of a class that count, 0: all."""
        alike = pictures.flatten(1) @ self.contents.flatten(1).T
        if most:
            alike[:, self._beyond(most)] = -2.0
        return self.labels[nearest(alike, own=own)]

    def known(self) -> float:
        """Return the share of the samples that are nearest to one of their own class."""
        return (self.nearest(self.contents, own=True) == self.labels).float().mean().item()

    def _beyond(self, most: int) -> Tensor:
        """Return the rows of every class after its first `most` ones, of an order that does not depend on classes."""
        order = torch.randperm(len(self.labels), generator=torch.Generator().manual_seed(0))
        return torch.cat([order[self.labels[order] == c][most:] for c in self.labels.unique()])

    def count(self, of: int) -> int:
        return int((self.labels == of).sum())

    def alike(self, near: Tensor, a: int, b: int) -> tuple[float, float]:
        """Return the shares of either class whose nearest sample is of the other."""
        return self.share(near, a, b), self.share(near, b, a)

    def share(self, near: Tensor, of: int, to: int) -> float:
        mine = near[self.labels == of]
        return (mine == to).float().mean().item() if len(mine) >= LEAST else 0.0


def exchanged(scan: inventory.Scan, data: Data, seed: int) -> Exchanged | None:
    """Return two classes that the training path of `data` exchanges, or None. `scan`: what was read of its evaluation path."""
    if (found := _pictures(scan, data)) is None or _paths_differ(found, data, seed):
        return None
    plain = found.nearest(found.contents, own=True)
    sure = [c for c in range(len(found.classes)) if found.share(plain, c, c) >= KNOWN]
    for name, change in CHANGES.items():
        changed = change(found.contents)
        if changed.shape != found.contents.shape:
            continue
        changed = found.place(changed)
        near = found.nearest(changed, own=True)
        for a, b in ((a, b) for a in sure for b in sure if a < b):
            alike = found.alike(near, a, b)
            if exchanging(alike) and found.count(a) != found.count(b):  # a large class is nearest to many pictures
                alike = found.alike(found.nearest(changed, own=True, most=min(found.count(a), found.count(b))), a, b)
            if not exchanging(alike):
                continue
            if (one := _made(found, data, change, a, b, seed)) >= MADE and (
                other := _made(found, data, change, b, a, seed)
            ) >= MADE:
                return Exchanged(name, (found.classes[a], found.classes[b]), alike, (one, other))
    return None


def _paths_differ(found: Pictures, data: Data, seed: int) -> bool:
    """Return whether hardly any draw of the training path is most like its own picture as the evaluation reads it: one of the two paths turns,
    mirrors or transposes all of them, which is no augmentation."""
    keyed, rows = Keyed(data, seed), range(0, len(found.indices), max(1, len(found.indices) // PAIRS))
    drawn = [(row, pooled(keyed[(0, found.indices[row])][found.input])) for row in rows]
    kept = [(row, x) for row, x in drawn if x.shape == found.contents.shape[1:]]
    if not kept:
        return False
    pictures, own = found.place(_smooth(torch.stack([x for _, x in kept]))), found.contents[[row for row, _ in kept]]
    views = [change(own) for change in (*CHANGES.values(), lambda x: x.transpose(-2, -1))]
    others = torch.stack([_alike(pictures, found.place(view)) for view in views if view.shape == own.shape])
    return (_alike(pictures, own) >= others.amax(0)).float().mean().item() < ITSELF


def exchanging(alike: tuple[float, float]) -> bool:
    """Return whether the shares are those of two classes that change places."""
    return min(alike) >= EXCHANGED and sum(alike) >= 2 * MEAN


def _pictures(scan: inventory.Scan, data: Data) -> Pictures | None:
    inputs = compared_fields(data)
    targets = [k for k, f in data.fields.items() if f.role == "target"]
    classes = data.fields[targets[0]].classes if len(targets) == 1 else None  # a mixture has two targets
    if not classes or len(inputs) != 1 or scan.contents is None or not scan.targets.get(targets[0]):
        return None
    labels = [scan.targets[targets[0]][i] for i in scan.kept]
    if not all(isinstance(y, int) for y in labels) or (found := _some(scan, data, inputs[0])) is None:
        return None
    contents, rows = found
    indices = [scan.index(r) for r in rows]
    middle, plain = (
        Pictures(place(contents), torch.tensor(labels)[rows], indices, list(classes), inputs[0], targets[0], place)
        for place in (_middle, lambda x: x)
    )
    return middle if middle.known() > plain.known() - PLACED else plain


def _some(scan: inventory.Scan, data: Data, key: str) -> tuple[Tensor, list[int]] | None:
    """Return (some pictures (N, C, H, W) of a scan, smoothed; their rows in the scan), or None if the field `key` holds none."""
    first = data.get(0, None)[key]
    if not isinstance(first, Tensor) or first.ndim != 3 or scan.contents is None:
        return None
    shape, rows = pooled(first).shape, list(range(0, len(scan.kept), -(-len(scan.kept) // ROWS)))
    if scan.contents.shape[1] != shape.numel():
        return None
    return _smooth(scan.contents[rows].unflatten(1, shape)), rows


def foreign(scan: inventory.Scan, data: Data, seed: int) -> Foreign | None:
    """Return a change that the training path of `data` makes and that the pictures of `scan` do not have, or None. For data that are
    generated: their pictures have the role `source`."""
    sources = [k for k, f in data.fields.items() if f.role == "source"]
    if len(sources) != 1 or len(scan.kept) < DRAWS or (found_pictures := _some(scan, data, sources[0])) is None:
        return None
    contents, rows = found_pictures
    keyed, drawn = Keyed(data, seed), torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:DRAWS]
    draws = torch.stack([pooled(keyed[(0, scan.index(rows[n]))][sources[0]]) for n in drawn.tolist()])
    if draws.shape[1:] != contents.shape[1:]:
        return None
    draws, plain = _smooth(draws), contents[drawn]
    if bool(((draws - plain).flatten(1).norm(dim=1) < 1e-3).all()):
        return None  # no augmentation
    found, own = [], _alike(draws, plain)
    for name, change in CHANGES.items():
        changed = change(plain)
        if changed.shape != plain.shape:
            continue
        alike = _alike(draws, changed)
        made = ((alike > own + CLEAR) & (alike > SAME)).float().mean().item()
        others = plain.flatten(1) @ contents.flatten(1).T, changed.flatten(1) @ contents.flatten(1).T
        for table in others:
            table[torch.arange(len(drawn)), drawn] = -2.0  # not with itself
        # not the nearest: a picture that was taken ten times in a row is always least like its mirrored copies
        before, after = (table.topk(len(rows) // 40 + 1).values[:, -1] for table in others)
        less = (after < before).float().mean().item()
        found.append(Foreign(name, less, made))
    found = [f for f in found if f.less >= FOREIGN and f.made >= MADE]
    return max(found, key=lambda f: f.made, default=None)


def _alike(a: Tensor, b: Tensor) -> Tensor:
    """Return the cosine of two lists of pictures (N, C, H, W) of unit norm, (N,)."""
    return (a * b).flatten(1).sum(1)


def _smooth(pictures: Tensor) -> Tensor:
    """Return pictures (N, C, H, W) that compare well where a stroke is a pixel off: blurred, centred, of unit norm."""
    blurred = F.avg_pool2d(pictures, 3, 1, 1)
    centred = blurred - blurred.mean((1, 2, 3), keepdim=True)
    return centred / centred.flatten(1).norm(dim=1).clamp_min(1e-9)[:, None, None, None]


def _middle(pictures: Tensor) -> Tensor:
    """Move pictures (N, C, H, W) so that what differs from the background is in the middle: else a turn moves it to another place, where a
    sample of another class may be nearest."""
    weight = (pictures - pictures.flatten(2).median(2).values[..., None, None]).abs().sum(1)
    for axis in (1, 2):
        along, n = weight.sum(3 - axis), weight.shape[axis]
        places = torch.arange(n, dtype=along.dtype)
        by = ((n - 1) / 2 - (along * places).sum(1) / along.sum(1).clamp_min(1e-9)).round().long()
        rows = (torch.arange(n) - by[:, None]) % n
        rows = rows[:, None, :, None] if axis == 1 else rows[:, None, None, :]
        pictures = pictures.gather(axis + 1, rows.expand_as(pictures))
    return pictures


def _made(found: Pictures, data: Data, change: Change, of: int, to: int, seed: int) -> float:
    """Return the share of draws of the class `of` that are nearest to one of `to`, and more like the changed sample than like the sample."""
    rows = (found.labels == of).nonzero().flatten().tolist()
    keyed = Keyed(data, seed)
    drawn = [(rows[n % len(rows)], keyed[(n // len(rows), found.indices[rows[n % len(rows)]])]) for n in range(DRAWS)]
    shape = found.contents.shape[1:]
    kept = [(row, x) for row, sample in drawn
            if int(sample[found.target]) == of and (x := pooled(sample[found.input])).shape == shape]  # fmt: skip
    if not kept:
        return 0.0
    pictures, own = found.place(_smooth(torch.stack([x for _, x in kept]))), found.contents[[row for row, _ in kept]]
    changed = (pictures * (found.place(change(own)) - own)).sum((1, 2, 3)) > 0
    return int(((found.nearest(pictures, own=False) == to) & changed).sum()) / DRAWS
