"""Finds training pictures without the fine detail that held-out pictures have: thumbnails that were enlarged again.

An enlarged picture has hardly any power at high spatial frequencies. Both splits are read on the evaluation path, which treats them alike.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from trainworthy.core.recipe.stage import Data

PICTURES, LEAST = 64, 24  # pictures of a split that are compared; with fewer there is no verdict
SIDE = 16  # pixels of the shorter side
HIGH = 0.25  # cycles per pixel; a picture has up to 0.5
TIMES, APART = 10.0, 0.99  # ratio of the medians, and share of the pairs in which the held-out picture has more


@dataclass
class Missing:
    """Shares of the power above HIGH."""

    field: str
    training: float
    held_out: float
    of: tuple[int, int]
    """Pictures."""

    def words(self) -> str:
        return (f"training pictures '{self.field}' lack the fine detail of the held-out ones: {self.training:.2%} of their power lies above "
                f"{HIGH:g} cycles per pixel, {self.held_out:.2%} of theirs (medians of {self.of[0]} and {self.of[1]})")  # fmt: skip


CAUSE = "training pictures were enlarged from thumbnails, blurred or compressed before they were stored, and held-out pictures were not"


def missing(train: Data, val: Data) -> Missing | None:
    """Return the detail that training pictures lack, or None."""
    inputs = [k for k, f in train.fields.items() if f.role == "input"]
    if len(inputs) != 1 or min(len(train), len(val)) < LEAST:
        return None
    found = [_shares(data, inputs[0]) for data in (train, val)]
    if min(map(len, found)) < LEAST:
        return None
    a, b = found
    less, more = a.median().item(), b.median().item()
    if more < TIMES * less or (b[:, None] > a).float().mean() < APART:
        return None
    return Missing(inputs[0], less, more, (len(a), len(b)))


def _shares(data: Data, key: str) -> Tensor:
    """Return the share of the power above HIGH of some pictures, without plain ones."""
    shares: list[float] = []
    for i in data.representative(min(PICTURES, len(data))):
        x = data.get(i, None)[key]
        if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[0] > 4 or min(x.shape[-2:]) < SIDE:
            return torch.zeros(0)
        h, w = x.shape[-2:]
        window = torch.hann_window(h)[:, None] * torch.hann_window(w)  # borders are no edges
        power = torch.fft.fft2((x.float() - x.float().mean((-2, -1), keepdim=True)) * window).abs().square().sum(0)
        high = torch.maximum(torch.fft.fftfreq(h).abs()[:, None], torch.fft.fftfreq(w).abs()) >= HIGH
        if (total := power.sum()) > 0:
            shares.append((power[high].sum() / total).item())
    return torch.tensor(shares)
