"""Finds stored masks that do not fit their pictures as they are: some are turned or mirrored, or all were interpolated, which puts other
classes along the outlines. No model is trained."""

from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F
from trainworthy.core.data.pairing import SIDE, steps
from trainworthy.core.recipe.stage import Data
from trainworthy.recipes.vision.data.masks import IGNORE
from trainworthy.recipes.vision.gates.answers import TURNS

PAIRS, LEAST = 200, 24  # stored pairs that are read, and those that are needed
SHARE, TIMES = 0.1, 4  # share of the masks that fit when they are turned; times as many as by any other turn
BETWEEN = 0.15  # share of the changes from one class to another that go through a class in between
ONE = 0.8  # share of one class among those: a class of borders is between background and inside on purpose
CHANGES = 500


def faults(data: Data) -> Iterator[tuple[str, str]]:
    """Yield (fault, cause) of the stored pairs of a data set of type masks.Windows."""
    rows = [*dict.fromkeys(place[0] for place in data.places)]
    chosen = rows[:: max(1, len(rows) // PAIRS)][:PAIRS]
    pairs = [data.pairs[row] for row in chosen]
    if fault := interpolated([mask for _, mask in pairs]):
        yield fault, "masks were resized, or saved, with interpolation or as JPEG: use nearest neighbour and PNG"
    if fault := turned(pairs):
        yield (
            fault,
            "pictures and masks were rotated differently, by other tools or by one that reads EXIF where the other does not",
        )


def turned(pairs: list[tuple[Tensor, Tensor]]) -> str:
    """Return the fault if masks (H, W) of some pictures (3, H, W) fit when they are turned, and not as they are; else "".

    A mask fits if the picture changes more under its outlines than elsewhere. A symmetrical mask fits both ways and does not count; a mask that
    fits no way is as likely to fit best by any turn."""
    found = [fit for picture, mask in pairs if (fit := _fits(picture, mask)) is not None]
    if len(found) < LEAST:
        return ""
    width = min(len(fit) for fit in found)  # a picture that is not square cannot be transposed
    fits = torch.tensor([fit[:width] for fit in found], dtype=torch.float64)
    best, which = fits.max(1)
    clear = best - fits[:, 0] > 0.5 * (best - fits.median(1).values).mean()
    counts = Counter(int(k) for k in which[clear])
    (most, n), (_, second) = [*counts.most_common(2), (0, 0), (0, 0)][:2]
    if n < max(LEAST // 2, SHARE * len(found)) or n < TIMES * (second + 1):
        return ""
    return f"{n} of {len(found)} masks fit their picture {TURNS[most].name} and not as they are stored ({second} by any other turn)"


def _fits(picture: Tensor, mask: Tensor) -> list[float] | None:
    slope = steps(picture.float()).amax(0, keepdim=True)  # (1, H, W)
    edge = (steps(mask[None].float()) > 0).float()
    square = mask.shape[-1] == mask.shape[-2]
    size = (min(slope.shape[-2], SIDE), min(slope.shape[-1], SIDE))
    here = F.adaptive_avg_pool2d(slope, size) / slope.mean().clamp_min(1e-9)
    lines = F.max_pool2d(F.adaptive_max_pool2d(edge, size), 3, 1, 1)
    if not 0 < lines.mean() < 0.5:
        return None
    return [float((turn.apply(lines) * here).sum() / lines.sum()) for turn in TURNS if square or not turn.exchanged]


def interpolated(masks: list[Tensor]) -> str:
    """Return the fault if masks (H, W) go from one class to another through classes in between; else ""."""
    changes, between = 0, Counter()
    for mask in masks:
        for rows in (mask.long(), mask.long().mT):
            before, here, after = rows[:, :-2], rows[:, 1:-1], rows[:, 2:]
            known = (before != after) & (before != IGNORE) & (here != IGNORE) & (after != IGNORE)
            changes += int(known.sum())
            inside = known & (here > torch.minimum(before, after)) & (here < torch.maximum(before, after))
            between.update(here[inside].tolist())
    n = between.total()
    if changes < CHANGES or n < BETWEEN * changes or max(between.values()) > ONE * n:
        return ""
    return (f"{n / changes:.0%} of the changes from one class to another in stored masks go through one of {len(between)} classes whose number "
            "is in between")  # fmt: skip
