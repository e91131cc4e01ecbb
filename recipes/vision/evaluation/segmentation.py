"""Metrics of masks, a baseline without a net, and pictures of predictions."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from trainworthy.core.base.doubles import to_double
from trainworthy.recipes.vision.data import pasted
from trainworthy.recipes.vision.data.mask_files import IGNORE
from trainworthy.recipes.vision.data.masks import Annotated, Composed, Windows

from trainworthy import core


# ------------------------------------------------------------------------------------------------------------------ scores
def scores(confusion: Tensor, classes: Sequence[str]) -> dict[str, float]:
    """Return the metrics of a confusion matrix (n, n) of pixels, truth in rows.

    Intersection over union and recall of each class that occurs or is predicted, the mean IoU and the pixel accuracy. With two classes
    also `iou`, the IoU of class 1."""
    confusion = to_double(confusion)
    hit, truth, predicted = confusion.diag(), confusion.sum(1), confusion.sum(0)
    union = truth + predicted - hit
    iou, seen = hit / union.clamp_min(1), union > 0
    whole = {"miou": iou[seen].mean().item() if seen.any() else 0.0,
             "pixel_accuracy": (hit.sum() / truth.sum().clamp_min(1)).item()}  # fmt: skip
    object_alone = {"iou": iou[1].item() if seen[1] else 1.0} if len(classes) == 2 else {}
    each = {f"iou/{c}": iou[i].item() for i, c in enumerate(classes) if seen[i]}
    return {
        **object_alone,
        **whole,
        **each,
        **{f"recall/{c}": (hit[i] / truth[i]).item() for i, c in enumerate(classes) if truth[i]},
    }


def counted(mask: Tensor, answer: Tensor, n: int) -> Tensor:
    """Return the confusion matrix (n, n) in pixels, truth in rows, without void. `mask` and `answer` have the same shape."""
    scored = mask != IGNORE
    return torch.bincount(mask[scored].long() * n + answer[scored].long(), minlength=n * n).view(n, n)


STRIP = 2**24  # logits that are enlarged at a time: 64 MB


def scored(batch: dict[str, Any], logits: Tensor, n: int) -> Tensor:
    """Return the confusion matrix of logits (B, n, H, W): over stored pixels if images were resized, else over the windows' pixels.

    Logits, not ids, are enlarged to the stored pixels (bilinear), one image and one strip of rows at a time."""
    if "stored" not in batch:
        return counted(batch["mask"], logits.argmax(1), n)
    total = torch.zeros(n, n, dtype=torch.long, device=logits.device)
    for single, ids, y, x in zip(logits, batch["stored"], batch["stored_y"], batch["stored_x"], strict=True):
        rows = max(1, STRIP // max(1, n * len(x)))
        for strip, at in zip(ids.split(rows), y.split(rows), strict=True):
            total += counted(strip, sampled(single.float(), at, x).argmax(0), n)
    return total


def sampled(logits: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """Return logits (n, H, W) at rows `y` and columns `x`, which lie between pixels: bilinear, (n, len(y), len(x))."""
    for dim, at in ((1, y), (2, x)):
        below = at.floor().long()
        above, share = (below + 1).clamp_max(logits.shape[dim] - 1), at - below
        share = share.view(-1, 1) if dim == 1 else share
        logits = logits.index_select(dim, below).lerp(logits.index_select(dim, above), share)
    return logits


def table(confusion: Tensor, classes: Sequence[str]) -> core.Matrix:
    """Return IoU, recall and precision in percent, for each class and their mean."""
    confusion = to_double(confusion)
    hit, truth, predicted = confusion.diag(), confusion.sum(1), confusion.sum(0)
    over = torch.stack([truth + predicted - hit, truth, predicted], 1)
    shares = torch.where(over > 0, 100 * hit[:, None] / over.clamp_min(1), torch.nan)
    values = torch.cat([shares.nanmean(0)[None], shares]).nan_to_num(0.0).round().long()
    return core.Matrix(
        values, rows=["mean", *classes], columns=["IoU", "recall", "precision"], axes=("class", "percent")
    )


def baselines(data: Annotated) -> dict[str, dict[str, float]]:
    """Return the validation metrics of a threshold without a net. The threshold is the best one on the training images."""
    if isinstance(data.pairs, Composed):
        scenes, n = data.pairs.scenes, len(data.classes)

        def scores_of(rows: list[int], threshold: int) -> dict[str, float]:
            truth = torch.stack([data.pairs.masks[i] for i in rows])
            return scores(counted(truth, pasted.by_hand([scenes[i] for i in rows], threshold)[1], n), data.classes)

        best = max(pasted.THRESHOLDS, key=lambda t: scores_of(data.learn[:100], t)["miou"])
        return {"vivid pixels, read by logistic regression": scores_of(data.held_out, best)}
    (picture, mask), (unseen, truth) = (data.pairs[i] for i in (*data.learn, *data.held_out))
    share = lambda predicted, mask: scores(counted(mask, predicted, 2), data.classes)["iou"]  # noqa: E731
    bright = max(range(256), key=lambda t: share(picture[0] > t, mask))
    return {"brightness above a threshold": {"iou": share(unseen[0] > bright, truth)}}


# --------------------------------------------------------------------------------------------------------------- pictures
def coloured(mask: Tensor) -> Tensor:
    """Return ids (H, W) as colours (3, H, W) in [0, 1]: black for id 0, one hue per class, mid-grey for void."""
    hue = mask.float() * 0.618034 % 1  # golden ratio: consecutive ids get distant hues
    wheel = (
        ((hue + torch.tensor([0, 2 / 3, 1 / 3], device=mask.device).view(3, 1, 1)) % 1 * 6 - 3).abs().sub(1).clamp(0, 1)
    )
    return torch.where(mask == IGNORE, 0.5, torch.where(mask == 0, 0.0, 0.25 + 0.75 * wheel))


def side_by_side(image: Tensor, *ids: Tensor) -> Tensor:
    """Return an image (C, H, W) in [0, 1] next to coloured masks: (3, H, W x (1 + len(ids)))."""
    return torch.cat([image.detach().float().expand(3, -1, -1), *map(coloured, ids)], 2)


def stitched(data: Windows, answer: Callable[[Tensor], Tensor], most: int = 4) -> list[core.Tile]:
    """Return tiles of the first `most` whole images: image, mask, and the prediction of `answer`, assembled from windows."""
    tiles = []
    for row in list(data.sizes)[:most]:
        image, mask = data.whole(row)
        predicted = torch.full_like(mask, IGNORE)
        for i, (of, top, left, (t, b), (lo, hi)) in enumerate(data.places):
            if of == row:
                own = answer(data.get(i, None)["image"][None])[0, t:b, lo:hi].to(predicted.dtype)
                part = predicted[top + t : top + b, left + lo : left + hi]
                part.copy_(own[: part.shape[0], : part.shape[1]])
        caption = f"{((predicted == mask) & (mask != IGNORE)).sum() / (mask != IGNORE).sum().clamp_min(1):.1%} right"
        plain = (x.as_subclass(Tensor) for x in (image, mask, predicted))
        tiles.append(core.Tile(caption, side_by_side(*plain)))
    return tiles
