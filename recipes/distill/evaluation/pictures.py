"""Pictures of the student's input, the teacher's features and the student's features; time runs to the right."""

from textwrap import fill

import torch
from torch import Tensor, nn
from trainworthy.recipes.shared.whisper import Whisper, word_error_rate

from trainworthy import core

# pixels per band of the sensor; recordings and channels of the teacher that are shown
BANDS, SHOWN, CHANNELS = 8, 4, 64


def shaded(values: Tensor, height: int, low: float, high: float) -> Tensor:
    """Return (T, C) numbers as a picture (C x height, T) uint8, the first channel at the bottom."""
    grey = ((values - low) / (high - low)).clamp(0, 1).mul(255).to(torch.uint8)
    return grey.T.flip(0).repeat_interleave(height, 0)


def preview(batch: dict, teacher: Whisper) -> list[core.Tile]:
    """Return the sensor's energies of each recording, with the text of its ids."""
    tiles = []
    for envelope, ids in zip(batch["envelope"], batch["ids"].tolist(), strict=True):
        frames = envelope[envelope.any(-1)]
        low, high = frames.quantile(torch.tensor([0.02, 0.98])).tolist()
        picture = shaded(frames, BANDS, low, high).repeat_interleave(2, 1)
        tiles.append(core.Tile(fill(teacher.text(ids), 20), picture))
    return tiles


def transcripts(model: nn.Module, batch: dict, teacher: Whisper) -> list[core.Tile]:
    """Return what is read from each recording, and the share that is correct."""
    heard = teacher.write(model(batch["envelope"]))
    return [
        core.Tile(h, score=max(0.0, 1 - word_error_rate([t], [h]))) for t, h in zip(batch["text"], heard, strict=True)
    ]


def side_by_side(model: nn.Module, data: core.Data, mean: Tensor) -> dict[str, list[core.Tile]]:
    """Return the teacher's features above the student's, the teacher's mean subtracted from both."""
    samples = [data.get(i, None) for i in range(min(SHOWN, len(data)))]
    device = next(model.parameters()).device
    batch = data.collate(samples)
    ours = model(batch["envelope"].to(device)).float().cpu()
    tiles = []
    for sample, row in zip(samples, ours, strict=True):
        n = int(sample["span"])
        above, below = (shaded((f[:n] - mean[:n])[:, :CHANNELS], 2, -2.0, 2.0) for f in (sample["features"], row))
        line = torch.full((4, n), 255, dtype=torch.uint8)
        tiles.append(core.Tile(fill(sample["text"], 20), torch.cat([above, line, below])))
    return {"What the teacher hears (above) and what the student makes of the sensor (below)": tiles}
