"""The small vision encoder: a CNN that predicts which digit, in which colour, is in each of 16 cells of a composite.

A built asset: trained on first use, without held-out digits, and cached under a hash of what it depends on.
"""

import json
import math
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.resnet import BasicBlock
from trainworthy.core.base import planning
from trainworthy.core.base.errors import UserError
from trainworthy.core.data import assets
from trainworthy.recipes.shared import composites, digits
from trainworthy.recipes.shared.composites import COLOURS, SIDE, TILE

WIDTHS = (16, 32, 64)
CROWD = (2, 4)  # digits in a training image of the encoder: more than questions need, so that each image teaches more
GRID = 8  # positions along a side
PLACE = SIDE // GRID
STEPS, BATCH, PEAK = 1400, 48, 3e-3
PASS = 256  # images between two warps of all digits
NEEDED = 0.93  # an encoder that reads fewer digits cannot answer about them


class Cells(nn.Module):
    """(B, 3, 64, 64) in [0, 1] -> (B, 16, 256): a stride-2 stem and three basic blocks (He 2016) with GroupNorm, at 8 x 8 positions. The
    upper and the lower half of each column are one feature; columns go from left to right."""

    side, width = SIDE, 4 * WIDTHS[-1]

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTHS[0], 5, 2, 2)
        self.blocks = nn.Sequential(_block(WIDTHS[0], WIDTHS[0], 1), *[_block(a, b, 2) for a, b in pairwise(WIDTHS)])

    def places(self, images: Tensor) -> Tensor:
        """Return features at each position, (B, 64, 8, 8)."""
        return self.blocks(F.relu(self.stem(4 * images - 1)))  # the images' mean is about 0.25

    def forward(self, images: Tensor) -> Tensor:
        x = self.places(images).unflatten(2, (2, GRID // 2))  # (B, C, 2, 4, 8)
        return x.permute(0, 4, 2, 1, 3).flatten(3).flatten(1, 2)


def _block(n_in: int, n_out: int, stride: int) -> BasicBlock:
    norm = lambda n: nn.GroupNorm(8, n)  # noqa: E731
    short = None if stride == 1 else nn.Sequential(nn.Conv2d(n_in, n_out, 1, stride, bias=False), norm(n_out))
    return BasicBlock(n_in, n_out, stride, short, norm_layer=norm)


class Reader(nn.Module):
    """The encoder during training. For each of 64 positions: is a digit centred there (B, 64), which one (B, 64, 10), in which colour (B,
    64, 4)."""

    def __init__(self):
        super().__init__()
        self.encoder = Cells()
        self.head = nn.Linear(WIDTHS[-1], 1 + 10 + len(COLOURS))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        there, digit, colour = self.head(self.encoder.places(images).flatten(2).transpose(1, 2)).split(
            [1, 10, len(COLOURS)], -1
        )
        return there.squeeze(-1), digit, colour


@cache
def folder() -> Path:
    """Return the folder of encoder.safetensors and its result; trained on first use, untrained to describe data."""
    sources = [__file__, composites.__file__, digits.__file__]
    name, make, takes = ("vlm-encoder", build, "2 to 3 min")
    if planning.is_describing_data:
        name, make, takes = ("vlm-encoder-untrained", save_untrained, "")
    return assets.built(name, {"torch": torch.__version__}, make, sources=sources, takes=takes)


def save_untrained(target: Path) -> None:
    """Save random weights: a description of data reads only the size and the number of features."""
    save_file(Cells().state_dict(), target / "encoder.safetensors")
    (target / "result.json").write_text("null")


def build(target: Path) -> None:
    """Train on crowded composites of warped training digits; evaluate on held-out digits."""
    with torch.random.fork_rng(devices=[]):  # callers that need randomness are seeded already
        torch.manual_seed(0)
        reader = Reader()
        optimizer = torch.optim.AdamW(reader.parameters(), lr=PEAK, weight_decay=0.05)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK, STEPS, pct_start=0.1)
        tiles = composites.pool("train").tiles
        warped = tiles
        for step in range(STEPS):
            if step % (len(tiles) // PASS) == 0:
                warped = warp(tiles)
            images, digit, colour = crowd("train", warped, range(step * BATCH, (step + 1) * BATCH))
            there_logits, digit_logits, colour_logits = reader(images)
            at = digit >= 0
            loss = F.cross_entropy(digit_logits[at], digit[at]) + 0.5 * F.cross_entropy(colour_logits[at], colour[at])
            # One position in twenty has a digit.
            loss = loss + 5 * F.binary_cross_entropy_with_logits(there_logits, at.float())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        result = measure(reader.eval())
    if result["digit"] < NEEDED:
        raise UserError("the vision encoder did not learn to read", got=result, needed=f"{NEEDED:.0%} of the digits")
    save_file(reader.encoder.state_dict(), target / "encoder.safetensors")
    (target / "result.json").write_text(json.dumps(result))


@torch.no_grad()
def measure(reader: Reader, n: int = 500) -> dict[str, float]:
    """Return the share of held-out digits, and of their colours, that are classified correctly at their position."""
    images, digit, colour = crowd("val", composites.pool("val").tiles, range(n))
    _, digit_logits, colour_logits = (
        torch.cat(predicted) for predicted in zip(*map(reader, images.split(100)), strict=True)
    )
    share = lambda predicted, truth: (predicted.argmax(-1) == truth)[digit >= 0].double().mean().item()  # noqa: E731
    return {"digit": share(digit_logits, digit), "colour": share(colour_logits, colour)}


def crowd(split: str, tiles: np.ndarray, indices: range) -> tuple[Tensor, Tensor, Tensor]:
    """Return images (n, 3, 64, 64) of several digits, the digit centred at each position (n, 64; -1: none) and its colour (n, 64)."""
    images, digit = [], torch.full((len(indices), GRID * GRID), -1)
    colour = torch.zeros_like(digit)
    for row, index in enumerate(indices):
        rng = composites.generator(split, "crowd", index)
        spots = composites.places(rng, int(rng.integers(CROWD[0], CROWD[1] + 1)))
        classes, tints = (
            rng.integers(10, size=len(spots)).tolist(),
            rng.integers(len(COLOURS), size=len(spots)).tolist(),
        )
        items = [
            composites.item(rng, split, p, digit=d, colour=c) for p, d, c in zip(spots, classes, tints, strict=True)
        ]
        for one in items:
            place = one.y // PLACE * GRID + one.x // PLACE
            digit[row, place], colour[row, place] = one.digit, one.colour
        images.append(composites.render(rng, items, tiles))
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 255, digit, colour


def warp(tiles: np.ndarray) -> np.ndarray:
    """Return every digit (n, 28, 28) rotated by up to 12 degrees, scaled and sheared by up to 15%, at random."""
    n = len(tiles)
    turn, shear = math.radians(12) * (2 * torch.rand(n) - 1), 0.15 * (2 * torch.rand(n) - 1)
    scale = 1 + 0.15 * (2 * torch.rand(n) - 1)
    rows = [turn.cos() / scale, shear - turn.sin(), torch.zeros(n), turn.sin(), turn.cos() / scale, torch.zeros(n)]
    grid = F.affine_grid(torch.stack(rows, 1).view(n, 2, 3), [n, 1, TILE, TILE], align_corners=False)
    moved = F.grid_sample(torch.from_numpy(tiles)[:, None].float(), grid, align_corners=False)
    return moved[:, 0].round().clamp(0, 255).to(torch.uint8).numpy()
