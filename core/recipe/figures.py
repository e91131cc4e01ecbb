"""What a recipe shows: tiles, tables and points."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Tile:
    """An image for the report, with its caption and, for a prediction, a score in [0, 1]."""

    caption: str
    image: Tensor | None = None
    """(H, W) or (H, W, 3) uint8; or (C, H, W) floats in [0, 1], which are converted to uint8."""
    score: float | None = None

    def __post_init__(self):
        if self.image is not None and self.image.is_floating_point():
            pixels = (self.image.detach().cpu() * 255).round().clamp(0, 255).to(torch.uint8)
            pixels = pixels.permute(1, 2, 0)  # (H, W, C)
            self.image = pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels


@dataclass
class Matrix:
    """A table of numbers for the report: (rows, columns), shaded by row."""

    values: Tensor
    rows: Sequence[str]
    columns: Sequence[str]
    axes: tuple[str, str] = ("", "")


@dataclass
class Points:
    """A scatter or line plot for the report: y over x, both (N,), for data whose x axis is neither steps nor
    classes."""

    x: Tensor
    y: Tensor
    axes: tuple[str, str]
    error: Tensor | None = None
    """Half the length of each point's error bar, (N,)."""
    diagonal: bool = False
    """Draw the line y = x, on which the points belong."""
    note: str = ""
    named: dict[str, Tensor] = field(default_factory=dict)
    """{name: values (N,)}: curves to compare over the same x. They replace the points."""
