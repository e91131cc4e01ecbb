"""Reads training samples twice: a random flip, turn or crop of the picture must also be made on its target.

Only targets that the loss was seen to compare are read: two views of a picture, or a picture and a hole in it, may well be drawn apart.
A movement counts where the picture shows which one it was, whatever noise or colours were drawn besides; a shift (a crop) only where
picture and target are moved without being computed anew.
"""

import time
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset
from trainworthy.core.base.correlation import pearson
from trainworthy.core.base.doubles import to_double
from trainworthy.guard.hooks.trees import as_tensor
from trainworthy.guard.measures.data.alignment import turns

SAMPLES, FEWEST = 64, 8
LINE = 24  # steps of a series, at least
LEVELS = 16  # values of a mask, at most
STILL = 8  # after so many samples that are equal twice, the data set has no random augmentation
# Correlation of a picture with itself, moved; by how much it exceeds that of any other movement
FITS, MARGIN = 0.8, 0.2
MOVED, OTHER = 0.95, 0.3  # the same of a target; by how much the picture's own movement fits it less
SHARE = 0.1
Shift = tuple[int, int]


def drawn_apart(seen: Any, loader: DataLoader, limit: float) -> tuple[str, str] | None:
    """Find targets that get another flip, turn or crop than their pictures."""
    data, place = loader.dataset, target_place(seen)
    if place is None or isinstance(data, IterableDataset):
        return None
    inputs = seen.fits.inputs.most_common(1)[0][0] if seen.fits.inputs else ()
    differ = known = same = 0
    for i in range(0, len(data), max(1, len(data) // SAMPLES)):
        if time.monotonic() > limit:
            break
        first, second = (planes(data[i], place, inputs) for _ in range(2))
        if first is None or second is None or len(first) != len(second):
            return None
        same += all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        if same >= STILL and same == i + 1 and not known:
            return None
        found = [moved_together(a, b, first[0], second[0]) for a, b in zip(first[1:], second[1:], strict=True)]
        found = [x for x in found if x is not None]
        known += bool(found)
        differ += bool(found) and not any(found)
    if known < FEWEST or differ < max(3, SHARE * known):
        return None
    return (
        f"{known} training samples were read twice: in {differ} of them the target was flipped, turned or shifted differently from its input",
        "the augmentation leaves the target as it is or draws again for it: one draw for both (torchvision draws from torch, not from random)",
    )


def target_place(seen: Any) -> int | None:
    """Return which entry of a batch the loss compares with the outputs, if it is one alone."""
    places = dict(seen.places) or (dict(seen.fits.places) if len(seen.roots) == 1 and not seen.fits.own else {})
    return next(iter(places)) if len(places) == 1 else None


def planes(sample: Any, place: int, inputs: tuple[int, ...]) -> list[Tensor] | None:
    """Return target and pictures of a sample as (H, W); None if they have none of one size. The picture of a mask is any entry of many
    values; that of a picture only what the model gets: others may be references, or holes in it."""
    leaves = [as_tensor(x) for x in tree_leaves(sample)]
    target = leaves[place] if place < len(leaves) else None
    if isinstance(target, Tensor) and (target.dim() == 1 or (target.dim() == 2 and len(target) == 1)):
        return lines(target.flatten(), [x for k, x in enumerate(leaves) if k != place])
    if not isinstance(target, Tensor) or target.dim() < 2 or min(target.shape[-2:]) < 8:
        return None
    mask = len(target.unique()) <= LEVELS
    others = [
        x
        for k, x in enumerate(leaves)
        if k != place and isinstance(x, Tensor) and x.dim() >= 2 and x.shape[-2:] == target.shape[-2:]
        and (len(x.unique()) > LEVELS if mask else inputs == (k,))
    ]  # fmt: skip
    return [plane(target), *map(plane, others)] if others else None


def lines(target: Tensor, others: list[Any]) -> list[Tensor] | None:
    """Return target and series of a sample as (1, L), of a series with a class for each of its steps; None if it is none."""
    size = len(target)
    series = [x for x in others if isinstance(x, Tensor) and x.dim() in (1, 2) and x.shape[-1] == size]
    series = [x for x in series if len(x.unique()) > LEVELS]
    if size < LINE or len(target.unique()) > LEVELS or not series:
        return None
    return [plane(x.reshape(-1, 1, size)) for x in (target, *series)]


def plane(x: Tensor) -> Tensor:
    """Return a sum of the channels, each with another weight: those of classes have a constant mean."""
    x = to_double(x.detach().reshape(-1, *x.shape[-2:]))
    return (x * torch.linspace(1.0, 2.0, len(x), dtype=x.dtype)[:, None, None]).sum(0)


def moved_together(a: Tensor, b: Tensor, y: Tensor, z: Tensor) -> bool | None:
    """Return whether the movement from picture a to b is also that from target y to z; None if it is not clear."""
    if a.shape != b.shape or y.shape != z.shape:
        return None
    if len(a) == 1:
        return along(a, b, y, z)
    fits = torch.tensor([pearson(x, b) for x in turns(a)])
    order = fits.argsort(descending=True)
    clear = float(fits[order[0]]) > FITS and float(fits[order[0]] - fits[order[1]]) > MARGIN
    if not clear or shift(turns(a)[int(order[0])], b) != (0, 0):
        return shifted_together(a, b, y, z)
    targets = torch.tensor([pearson(x, z) for x in turns(y)])
    mine, best = float(targets[order[0]]), float(targets.max())
    if best < MOVED:
        return None
    return True if mine > MOVED else False if mine < best - OTHER else None


def shifted_together(a: Tensor, b: Tensor, y: Tensor, z: Tensor) -> bool | None:
    """The same for a flip or turn, and a shift that leaves the values as they are."""
    for k, x in enumerate(turns(a)):
        way = shift(x, b)
        if not matches(x, b, way):
            continue
        if matches(turned := turns(y)[k], z, way):
            return True
        others = ((t, shift(v, z)) for t, v in enumerate(turns(y)))
        own = next(((t, s) for t, s in others if matches(turns(y)[t], z, s)), None)
        clear = own is not None and not matches(turns(a)[own[0]], b, own[1])
        return False if clear and float(turned.std()) > 0 else None
    return None


def along(a: Tensor, b: Tensor, y: Tensor, z: Tensor) -> bool | None:
    """The same for series that are shifted or reversed."""
    ways = [(turn, shift(x, b)) for turn in (False, True) if matches(x := a.flip(-1) if turn else a, b, shift(x, b))]
    if len(ways) != 1 or not float(y.std()) > 0:
        return None
    turn, way = ways[0]
    if matches(y.flip(-1) if turn else y, z, way):
        return True
    return False if any(matches(x, z, shift(x, z)) for x in (y, y.flip(-1))) else None


def shift(x: Tensor, y: Tensor) -> Shift:
    """Return by how many places y is x moved down and to the right."""
    u, v = (torch.fft.rfft2(w - w.mean()) for w in (x, y))
    both = v * u.conj()
    peak = int(torch.fft.irfft2(both / both.abs().clamp_min(1e-12), s=x.shape).argmax())
    down, right = divmod(peak, x.shape[1])
    return tuple(k - n if k > n // 2 else k for k, n in zip((down, right), x.shape, strict=True))  # type: ignore[return-value]


def matches(x: Tensor, y: Tensor, way: Shift) -> bool:
    """Return whether y is x moved this way, in all places that both have (but for padding), and these are at least half."""
    (h, w), (down, right) = x.shape, way
    a = x[max(0, -down) : h - max(0, down), max(0, -right) : w - max(0, right)]
    b = y[max(0, down) : h - max(0, -down), max(0, right) : w - max(0, -right)]
    if a.numel() < 0.5 * x.numel() or float(a.std()) == 0:
        return False
    return float(((a - b).abs() < 1e-6).double().mean()) > 0.75 and pearson(a, b) > 0.5
