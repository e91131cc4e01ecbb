"""Renders tiles: PNG bytes for the report, contact sheets for the run folder."""

import io
import warnings
from pathlib import Path

import torch
from torch import Tensor
from trainworthy.core.recipe.stage import Tile


def png(image: Tensor) -> bytes:
    """Encode (H, W) or (H, W, 3) uint8 as PNG."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(image.detach().cpu().to(torch.uint8).numpy()).save(buffer, "PNG")
    return buffer.getvalue()


def contact_sheet(tiles: list[Tile], path: Path) -> None:
    """Draw tiles with their captions as one PNG; a tile without an image shows its caption alone."""
    from matplotlib.figure import Figure

    columns = 8
    tiles = tiles[: 8 * columns]
    lines = max((tile.caption.count("\n") + 1 for tile in tiles), default=1)
    words = 0.06 + 0.14 * lines  # inches, like all sizes below
    wide, high, rows = 1.3, words + 1.35, (len(tiles) + columns - 1) // columns
    figure = Figure(figsize=(wide * columns, high * rows))
    axes = figure.add_axes((0, 0, 1, 1))  # one axes for all tiles, since the layout of many takes seconds
    for i, tile in enumerate(tiles):
        left, top = i % columns * wide, i // columns * high
        color = "crimson" if tile.score is not None and tile.score < 0.5 else "black"
        at = (left + wide / 2, top + words)
        axes.text(*at, tile.caption, size=8, ha="center", va="bottom", color=color, parse_math=False)  # "$5 to $9"
        if tile.image is not None:
            picture = tile.image.cpu().numpy()
            scale = (wide - 0.1) / max(picture.shape[:2])
            h, w = picture.shape[0] * scale, picture.shape[1] * scale
            x, y = left + (wide - w) / 2, top + words + 0.05
            axes.imshow(picture, cmap="gray", vmin=0, vmax=255, extent=(x, x + w, y + h, y))
    axes.set(xlim=(0, wide * columns), ylim=(high * rows, 0), aspect="auto")
    axes.set_axis_off()
    path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        # Chinese, say: the report has the captions as text
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure.savefig(path, dpi=110)
