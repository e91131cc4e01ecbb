"""Finds the stored picture behind one that a net is asked about. An evaluation may mirror, turn or brighten its pictures before it asks
(test-time augmentation)."""

from dataclasses import dataclass

import torch
from torch import Tensor
from trainworthy.core.base.correlation import pearson
from trainworthy.core.base.verdict import Skip

ALIKE, CLEAR = 0.95, 0.02  # least correlation with a stored picture, and by how much the next picture must be below it


@dataclass(frozen=True)
class Turn:
    """One of the eight ways to lay a square picture."""

    name: str
    exchanged: bool
    """Rows become columns, first."""
    flipped: tuple[int, ...]
    """Axes of (..., H, W) that are mirrored, then."""

    def apply(self, x: Tensor) -> Tensor:
        x = x.transpose(-2, -1) if self.exchanged else x
        return x.flip(self.flipped) if self.flipped else x

    def undo(self, x: Tensor) -> Tensor:
        x = x.flip(self.flipped) if self.flipped else x
        return x.transpose(-2, -1) if self.exchanged else x

    def boxes(self, xyxy: Tensor, size: tuple[int, int]) -> Tensor:
        """Return boxes (N, 4) of the picture in pixels as they lie in the turned picture of `size` (H, W)."""
        x1, y1, x2, y2 = (xyxy[:, [1, 0, 3, 2]] if self.exchanged else xyxy).unbind(1)
        x1, x2 = (size[1] - x2, size[1] - x1) if -1 in self.flipped else (x1, x2)
        y1, y2 = (size[0] - y2, size[0] - y1) if -2 in self.flipped else (y1, y2)
        return torch.stack([x1, y1, x2, y2], 1)


SAME = Turn("as it is", False, ())
TURNS = (
    SAME,
    Turn("mirrored", False, (-1,)),
    Turn("upside down", False, (-2,)),
    Turn("turned by half", False, (-2, -1)),
    Turn("turned by a quarter", True, (-2,)),
    Turn("turned by three quarters", True, (-1,)),
    Turn("transposed", True, ()),
    Turn("transposed and turned by half", True, (-2, -1)),
)


def key(image: Tensor) -> bytes:
    """Return the bytes of an image on the CPU, by which it is found again."""
    return image.contiguous().numpy().tobytes()


class Stored:
    """Pictures (C, H, W) whose answers are known."""

    def __init__(self, pictures: list[Tensor]):
        self.pictures = [p.detach().cpu() for p in pictures]
        self.rows = {key(p): i for i, p in enumerate(self.pictures)}
        self.turned: set[str] = set()
        """How the pictures were turned that were found so far."""

    def find(self, image: Tensor) -> tuple[int, Turn]:
        """Return the row of the stored picture that `image` shows, and how it is turned. A picture that is none of them (another size,
        a part) skips the gate: no answer is known."""
        image = image.detach().cpu()
        for turn in TURNS:
            if (row := self.rows.get(key(turn.undo(image)))) is not None:
                return self._seen(row, turn)
        best, chosen, second = 0.0, (0, SAME), 0.0
        for row, picture in enumerate(self.pictures):
            found = [(_alike(turn.undo(image), picture), turn) for turn in TURNS]
            alike, turn = max(found, key=lambda one: one[0])
            if alike > best:
                best, chosen, second = alike, (row, turn), best
            else:
                second = max(second, alike)
        if best < ALIKE or best - second < CLEAR:
            size = "x".join(map(str, image.shape[-2:]))
            raise Skip(f"the evaluation reads pictures that are none of the held-out ones ({size} pixels; cut or resized?): their answers "
                       "are unknown")  # fmt: skip
        return self._seen(*chosen)

    def _seen(self, row: int, turn: Turn) -> tuple[int, Turn]:
        if turn is not SAME:
            self.turned.add(turn.name)
        return row, turn


def _alike(a: Tensor, b: Tensor) -> float:
    """Return the correlation of two pictures; 0 for other shapes."""
    return pearson(a, b) if a.shape == b.shape else 0.0
