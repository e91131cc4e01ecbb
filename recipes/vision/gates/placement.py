"""Finds boxes that do not lie on what their pictures show: those of another row, and those of a smaller copy of the picture.

A box fits if the pixels inside it change more from one to the next than those around it. No model is trained.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from trainworthy.core.data import pairing
from trainworthy.core.recipe.stage import Data

LAGS = (1, -1, 2, -2)
AROUND = 0.25  # width of the frame around a box, as a share of its sides
SCALES = tuple(2 ** (k / 8) for k in range(2, 25))  # 1.19 to 8


@dataclass
class Smaller:
    """Pictures whose boxes fit when they are enlarged."""

    scale: float
    pictures: int
    """Pictures in which the enlarged boxes fit better."""
    of: int
    """Pictures that were read."""
    stored: float
    """Mean fit of the stored boxes, -1 to 1."""
    enlarged: float
    others: float
    """Mean fit of another picture's enlarged boxes."""
    sure: float
    """Standard errors by which the enlarged boxes fit better than either."""

    def words(self) -> str:
        return (f"in {self.pictures} of {self.of} pictures the boxes fit {self.scale:.2f} times as large ({self.enlarged:+.2f}) and not as "
                f"they are stored ({self.stored:+.2f}; boxes of another picture {self.others:+.2f}; {self.sure:.0f} standard errors)")  # fmt: skip


class Placed:
    """Pictures with their boxes, prepared so that any boxes can be compared with any picture."""

    def __init__(self, rows: list[dict[str, Any]]):
        self.boxes = [row["boxes"][row["labels"] >= 0] for row in rows]
        self.sides = [row["scale"] * row["size"].flip(0) for row in rows]  # (2,) width and height on the canvas
        self.sums = [
            F.pad(pairing.steps(row["image"]).amax(0).double().cumsum(0).cumsum(1), (1, 0, 1, 0)) for row in rows
        ]

    def inside(self, row: int, boxes: Tensor) -> bool:
        """Return whether boxes (k, 4) lie in the picture of `row`."""
        return bool(len(boxes)) and bool((boxes[:, 2:] <= self.sides[row] + 1).all())

    def fit(self, row: int, boxes: Tensor) -> float | None:
        """Return how much more the pixels change inside boxes (k, 4) than around them, -1 to 1; None if they do not lie in the picture."""
        if not self.inside(row, boxes):
            return None
        wide, high = self.sides[row].tolist()
        frame = AROUND * (boxes[:, 2:] - boxes[:, :2])
        outer = torch.cat([boxes[:, :2] - frame, boxes[:, 2:] + frame], 1)
        within, area = self._sum(row, boxes, wide, high)
        total, whole = self._sum(row, outer, wide, high)
        here, around = within / area.clamp_min(1), (total - within) / (whole - area).clamp_min(1)
        return ((here - around) / (here + around).clamp_min(1e-6)).mean().item()

    def _sum(self, row: int, boxes: Tensor, wide: float, high: float) -> tuple[Tensor, Tensor]:
        """Return (sum of the changes in boxes (k, 4), their area in pixels)."""
        x = boxes[:, ::2].round().clamp(0, round(wide)).long()
        y = boxes[:, 1::2].round().clamp(0, round(high)).long()
        (x0, x1), (y0, y1), sums = x.unbind(1), y.unbind(1), self.sums[row]
        return sums[y1, x1] - sums[y0, x1] - sums[y1, x0] + sums[y0, x0], (x1 - x0) * (y1 - y0)


def faults(data: Data) -> Iterator[tuple[str, str]]:
    """Yield (fault, cause) of the boxes of a data set of type boxes.Boxed."""
    if len(data) < 2 * pairing.LEAST:
        return
    if (found := pairing.moved(data, pairing.Comparison("boxes", pairing.PICTURES, LAGS, _fits))) is not None:
        yield (
            found.words(),
            f"the list of boxes moved by {abs(found.lag)} against the pictures: a picture was deleted or inserted",
        )
    elif (
        small := smaller(Placed([data.get(i, None) for i in data.representative(min(pairing.PICTURES, len(data)))]))
    ) is not None:
        yield (
            small.words(),
            f"boxes were drawn on pictures about {small.scale:.1f} times smaller, and not enlarged with them",
        )


def _fits(rows: list[dict[str, Any]]) -> pairing.Fit:
    placed = Placed(rows)
    return lambda i, j: placed.fit(j, placed.boxes[i])


def smaller(placed: Placed) -> Smaller | None:
    """Return the scale at which boxes of some pictures certainly fit better than as they are stored, or None.

    Stored boxes must fit no better and no worse than those of another picture do.
    """
    found = [one for scale in SCALES if (one := _enlarged(placed, scale)) is not None]
    return max(found, key=lambda one: one.sure, default=None)


def _enlarged(placed: Placed, scale: float) -> Smaller | None:
    rows = [i for i, boxes in enumerate(placed.boxes) if placed.inside(i, scale * boxes)]
    fits = []
    for k, i in enumerate(rows):
        other = rows[(k + len(rows) // 2) % len(rows)]
        fits.append([placed.fit(i, b) for b in (placed.boxes[i], scale * placed.boxes[i], scale * placed.boxes[other])])
    known = torch.tensor([f for f in fits if None not in f], dtype=torch.float64).reshape(-1, 3)
    if len(known) < pairing.LEAST:
        return None
    own, large, far = known.unbind(1)
    sure = min(pairing.standard_errors(large - own), pairing.standard_errors(large - far))
    if sure < pairing.SURE or abs((own - far).mean()) > pairing.UNRELATED * (large - far).mean():
        return None
    better = int((large > own).sum())
    return Smaller(scale, better, len(placed.boxes), *(x.mean().item() for x in (own, large, far)), sure)
