"""Finds pictures and volumes whose masks or boxes were flipped or turned on their own: another flip or turn of them fits the picture better."""

import itertools
import math
import time
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from trainworthy.core.base.doubles import to_double
from trainworthy.guard.hooks.trees import entries

SAMPLES, LEAST = 128, 32
VOLUMES = 8  # that are enough: each holds as much as many pictures
PLACES = 2**16  # of a volume that are compared
CLEAR = 0.3  # by how much more of a picture's variance another flip or turn of its mask explains
SURE, TWICE = 8.0, 2.0  # standard errors, and times as much, by which one flip or turn explains more of all pictures
STRAY = 0.15  # of the evaluation's gain: masks that fit hardly better than when flipped or turned
CAUSE = "the augmentation moves the picture and not its mask or boxes, or draws again for them: one draw for both"
TURNED = (
    "rows and columns (y and x) are exchanged in the pictures or in their masks or boxes, or one of them is flipped"
)


def turned_apart(train: DataLoader, evals: dict[int, DataLoader], limit: float) -> tuple[str, str] | None:
    """Compare pictures and masks of both splits. In the evaluation nothing is augmented: there a mask fits as it is."""
    for loader in evals.values():
        known = scores(loader, limit)
        if len(known) < least(known):
            continue
        margin = 0.5 * float((known[:, 0] - known[:, 1:].mean(1)).mean())
        if margin < 0.02:  # the mask says nothing about the picture's values
            continue
        found = scores(train, limit)
        if len(found) < least(found):
            return None
        (own, others), (kept, turned) = ((float(s[:, 0].mean()), float(s[:, 1:].mean())) for s in (found, known))
        if own - others < STRAY * (kept - turned):
            return (
                f"the pictures of training explain {own:.0%} of their masks as they are and {others:.0%} of them flipped or turned, those of the "
                f"evaluation {kept:.0%} and {turned:.0%}",
                f"{CAUSE}\nthe masks are those of other pictures",
            )
        wrong, usual = (float((s[:, 1:].amax(1) > s[:, 0] + margin).float().mean()) for s in (found, known))
        if wrong > 0.2 and usual < 0.05:
            return (
                f"the masks or boxes of {wrong:.0%} of {len(found)} training samples fit their pictures better when flipped or turned, "
                f"and {usual:.0%} of {len(known)} in the evaluation",
                CAUSE,
            )
        return None
    return alone(train, limit)


def alone(train: DataLoader, limit: float) -> tuple[str, str] | None:
    """Without pictures of an evaluation to compare with: another flip or turn of the mask fits the picture clearly better."""
    found = scores(train, limit)
    if len(found) < LEAST:
        return None
    gain = found[:, 1:] - found[:, :1]
    sure = gain.mean(0) / (gain.std(0) / len(gain) ** 0.5).clamp_min(1e-12) > SURE
    better = sure & (found[:, 1:].mean(0) > TWICE * found[:, 0].mean())
    if bool(better.any()):
        own, other = float(found[:, 0].mean()), float(found[:, 1:].mean(0)[better].max())
        return (
            f"the pictures of {len(found)} training samples explain {own:.0%} of their masks or boxes as they are and {other:.0%} of them flipped or "
            "turned, all in one way",
            TURNED,
        )
    wrong = float((gain.amax(1) > CLEAR).float().mean())
    if wrong <= 0.2:
        return None
    return (
        f"the masks or boxes of {wrong:.0%} of {len(found)} training samples fit their pictures better when flipped or turned",
        CAUSE,
    )


def least(found: Tensor) -> int:
    """Return how many samples must be known: a volume has more than eight flips and turns."""
    return VOLUMES if found.shape[1] > 8 else LEAST


def scores(loader: DataLoader, limit: float) -> Tensor:
    """Return how much of each mask its picture's channels explain, as it is and in each flip and turn (n, k)."""
    data, rows = loader.dataset, []
    if isinstance(data, IterableDataset):
        return torch.zeros(0, 1)
    for i in range(0, len(data), max(1, len(data) // SAMPLES)):
        pair = picture_and_mask(data[i])
        if pair is None or time.monotonic() > limit:
            break
        x, y = pair
        rows += [explained(x, turns(y) if y.dim() == 2 else turned(y))] * bool((y != y.flatten()[0]).any())
    return torch.tensor(rows) if rows else torch.zeros(0, 1)


def picture_and_mask(sample: Any) -> tuple[Tensor, Tensor] | None:
    """Return the channels (C, H, W) and the foreground (H, W) of a sample, if it has both; of a volume (C, D, H, W) and (D, H, W). Foreground is
    also what lies in its boxes."""
    every = entries(sample)
    leaves = [x for x in every if x.dim() >= 2 and min(x.shape[-2:]) >= 8]
    if len(leaves) == 1 and leaves[0].dim() == 3 and len(leaves[0].unique()) > 16:
        found = [m for x in every if x is not leaves[0] and (m := within(x, *leaves[0].shape[-2:])) is not None]
        return (to_double(leaves[0]), found[0]) if len(found) == 1 else None
    if len(leaves) != 2 or leaves[0].shape[-2:] != leaves[1].shape[-2:]:
        return None
    picture, mask = to_double(leaves[0]), to_double(leaves[1])
    axes = 3 if picture.dim() == 4 else 2
    shape = picture.shape[-axes:]
    if mask.shape[-axes:] != shape or mask.numel() != math.prod(shape):
        return None
    if picture.dim() > 4 or not leaves[0].is_floating_point():
        return None
    if (leaves[1].is_floating_point() and bool(((mask != 0) & (mask != 1)).any())) or len(picture.unique()) <= 16:
        return None  # another view of the picture
    step = 1 if axes == 2 else max(1, math.ceil((mask.numel() / PLACES) ** (1 / 3)))
    cut = (..., *[slice(None, None, step)] * axes)
    return picture.reshape(-1, *shape)[cut], (mask.reshape(shape) > 0).double()[cut]


def within(boxes: Tensor, high: int, wide: int) -> Tensor | None:
    """Return which pixels (H, W) lie in boxes (K, 4) with the corners x1, y1, x2, y2, or (K, 5) with a class and centre and size in shares of the
    picture; None if these are no such boxes."""
    b, size = to_double(boxes), torch.tensor([wide, high, wide, high]).double()
    if b.dim() != 2 or not len(b) or b.shape[1] not in (4, 5):
        return None
    if b.shape[1] == 5:
        if bool((b[:, 0] != b[:, 0].round()).any()) or float(b[:, 1:].min()) < 0 or float(b[:, 1:].max()) > 1:
            return None
        b = torch.cat([b[:, 1:3] - b[:, 3:] / 2, b[:, 1:3] + b[:, 3:] / 2], 1) * size
    if float(b.max()) < 2 or float(b.min()) < -1 or bool((b > size + 1).any()) or bool((b[:, 2:] <= b[:, :2]).any()):
        return None
    mask = torch.zeros(high, wide).double()
    for left, top, right, bottom in b.round().int().tolist():
        mask[max(0, top) : bottom, max(0, left) : right] = 1
    return mask


def turned(y: Tensor) -> list[Tensor]:
    """Return the mask of a volume as it is, its flips, and its turns between axes of one length."""
    orders = [p for p in itertools.permutations(range(3)) if y.permute(p).shape == y.shape]
    flips = [axes for n in range(4) for axes in itertools.combinations(range(3), n)]
    return [y.permute(p).flip(axes) for p in orders for axes in flips]


def turns(y: Tensor) -> list[Tensor]:
    """Return the mask as it is, its flips, and where it is square its turns."""
    flips = [y, y.flip(0), y.flip(1), y.flip(0, 1)]
    return flips + [f.t() for f in flips] * (y.shape[0] == y.shape[1])


def explained(x: Tensor, masks: list[Tensor]) -> list[float]:
    """Return the share of each mask's variance (H, W) that a weighted sum of the channels of x (C, H, W) explains."""
    a, b = (v.flatten(1) - v.flatten(1).mean(1, keepdim=True) for v in (x, torch.stack(masks)))
    products = b @ a.T
    return ((products @ torch.linalg.pinv(a @ a.T) * products).sum(1) / b.square().sum(1).clamp_min(1e-30)).tolist()
