"""Compares samples by content: how similar two are in all of their inputs together."""

import torch
from torch import Tensor

SHORT = 32  # entries below which the angle between two rows has no meaning


def rows(samples: list[list[Tensor]]) -> tuple[Tensor, list[int]] | None:
    """Return (rows (N, D), widths of the parts of a row), or None if samples differ in size.

    Args:
        samples: each sample's inputs, flattened. Each long one is a part of its own, centred and of unit norm, so that none outweighs the
            others by its size or scale. The short ones together are the last part: as they are next to a long one, otherwise like one.
    """
    sizes = [len(x) for x in samples[0]]
    if any([len(x) for x in one] != sizes for one in samples):
        return None
    long = [k for k, n in enumerate(sizes) if n >= SHORT]
    short = [k for k in range(len(sizes)) if k not in long]
    parts = [_unit(torch.stack([one[k] for one in samples])) for k in long]
    if short:
        rest = torch.stack([torch.cat([one[k] for k in short]) for one in samples])
        parts.append(rest if long and rest.shape[1] < SHORT else _unit(rest))
    return torch.cat(parts, 1), [part.shape[1] for part in parts]


def _unit(values: Tensor) -> Tensor:
    centred = values - values.mean(1, keepdim=True)
    return centred / centred.norm(dim=1, keepdim=True).clamp_min(1e-9)


def similarity(a: Tensor, b: Tensor, widths: list[int]) -> Tensor:
    """Return (rows of `a`, rows of `b`) the cosine of two samples, or that of their least similar part if they have several.

    The short part has 1 - d²/2 instead, where d² is the mean squared distance in standard deviations of `b`: 1 for equal rows, 0 on
    average for two different ones."""
    if len(widths) == 1:
        return a @ b.T
    least, most = torch.ones(len(a), len(b)), torch.full((len(a), len(b)), -1.0)
    for x, y in zip(a.split(widths, 1), b.split(widths, 1), strict=True):
        if x.shape[1] < SHORT:
            scale = y.std(0, correction=0)
            scale = torch.where(scale > 0, scale, torch.ones_like(scale))
            least = torch.minimum(least, 1 - torch.cdist(x / scale, y / scale).square() / (2 * x.shape[1]))
            continue
        dot = x @ y.T
        # A constant part has no direction: two constant ones are alike
        least = torch.minimum(least, 1 - (x.square().sum(1)[:, None] + y.square().sum(1)[None]) / 2 + dot)
        most = torch.maximum(most, dot)
    return torch.minimum(least, most)
