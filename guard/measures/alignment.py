"""Finds pictures whose masks were flipped or turned on their own: another flip or turn of the mask fits the picture better."""

import time
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from trainworthy.core.base.doubles import to_double
from trainworthy.guard.hooks.trees import tensors

SAMPLES, LEAST = 128, 32
CLEAR = 0.3  # by how much more of a picture's variance another flip or turn of its mask explains
STRAY = 0.15  # of the evaluation's gain: masks that fit hardly better than when flipped or turned
CAUSE = (
    "the augmentation moves the picture and not its mask, or draws again for the mask: one draw for picture and mask"
)


def turned_apart(train: DataLoader, evals: dict[int, DataLoader], limit: float) -> tuple[str, str] | None:
    """Compare pictures and masks of both splits. In the evaluation nothing is augmented: there a mask fits as it is."""
    for loader in evals.values():
        known = scores(loader, limit)
        if len(known) < LEAST:
            continue
        margin = 0.5 * float((known[:, 0] - known[:, 1:].mean(1)).mean())
        if margin < 0.02:  # the mask says nothing about the picture's values
            continue
        found = scores(train, limit)
        if len(found) < LEAST:
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
                f"the masks of {wrong:.0%} of {len(found)} training samples fit their pictures better when flipped or turned, "
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
    wrong = float((found[:, 1:].amax(1) > found[:, 0] + CLEAR).float().mean())
    if wrong <= 0.2:
        return None
    return (
        f"the masks of {wrong:.0%} of {len(found)} training samples fit their pictures better when flipped or turned",
        CAUSE,
    )


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
        rows += [explained(x, turns(y))] * bool((y != y[0, 0]).any())
    return torch.tensor(rows) if rows else torch.zeros(0, 1)


def picture_and_mask(sample: Any) -> tuple[Tensor, Tensor] | None:
    """Return the channels (C, H, W) and the foreground (H, W) of a sample, if it has both."""
    leaves = [x for x in tensors(sample) if x.dim() >= 2 and min(x.shape[-2:]) >= 8]
    if len(leaves) != 2 or leaves[0].shape[-2:] != leaves[1].shape[-2:]:
        return None
    picture, mask = to_double(leaves[0]), to_double(leaves[1])
    if mask.numel() != mask.shape[-2] * mask.shape[-1] or picture.dim() > 3 or not leaves[0].is_floating_point():
        return None
    if (leaves[1].is_floating_point() and bool(((mask != 0) & (mask != 1)).any())) or len(picture.unique()) <= 16:
        return None  # another view of the picture
    return picture.reshape(-1, *picture.shape[-2:]), (mask.reshape(mask.shape[-2:]) > 0).double()


def turns(y: Tensor) -> list[Tensor]:
    """Return the mask as it is, its flips, and where it is square its turns."""
    flips = [y, y.flip(0), y.flip(1), y.flip(0, 1)]
    return flips + [f.t() for f in flips] * (y.shape[0] == y.shape[1])


def explained(x: Tensor, masks: list[Tensor]) -> list[float]:
    """Return the share of each mask's variance (H, W) that a weighted sum of the channels of x (C, H, W) explains."""
    a, b = (v.flatten(1) - v.flatten(1).mean(1, keepdim=True) for v in (x, torch.stack(masks)))
    products = b @ a.T
    return ((products @ torch.linalg.pinv(a @ a.T) * products).sum(1) / b.square().sum(1).clamp_min(1e-30)).tolist()
