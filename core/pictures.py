"""Tiles as pictures: PNG bytes for the report, contact sheets for the run folder."""

import io
from pathlib import Path

import torch
from torch import Tensor

from core.stage import Tile


def png(image: Tensor, *, side: int = 0) -> bytes:
    """(H, W) or (H, W, 3) uint8 to PNG; enlarged by whole pixels to about `side`."""
    from PIL import Image

    picture = Image.fromarray(image.detach().cpu().to(torch.uint8).numpy())
    if side and (factor := side // max(picture.size)) > 1:
        picture = picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


def contact_sheet(tiles: list[Tile], path: Path, *, columns: int = 8) -> None:
    """Tiles with their captions as one PNG; tiles without a picture show their caption alone."""
    from matplotlib.figure import Figure

    tiles = tiles[: 8 * columns]
    rows = (len(tiles) + columns - 1) // columns
    figure = Figure(figsize=(1.3 * columns, 1.55 * rows), layout="constrained")
    for i, tile in enumerate(tiles):
        axes = figure.add_subplot(rows, columns, i + 1)
        axes.set_axis_off()
        axes.set_title(tile.caption, fontsize=8, color="black" if tile.good is None or tile.good >= 0.5 else "crimson")
        if tile.image is not None:
            axes.imshow(tile.image.cpu().numpy(), cmap="gray", vmin=0, vmax=255)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
