"""Finds maps of classes that were resized by interpolation: between classes 0 and 2 there is a seam of class 1, as wide as one pixel."""

from typing import Any

import torch
from torch import Tensor
from trainworthy.core.base.verdict import Fault

LEAST, CALLS, PICTURES = 200, 4, 8  # pixels of seams, calls, pictures of a batch
THIN = 2.0  # seams for each place where the class between is wider than a pixel: where classes are levels, most places are wide
SOLID = 0.25  # of the classes between is surrounded by itself: a class that is an outline by design has no inside


@torch.no_grad()
def seams(target: Tensor, ignore: int) -> list[int] | None:
    """Return, for class maps (N, H, W): pixels of a seam, pixels next to a higher class that are no seam, jumps over a class, pixels of the
    classes between, and those of them that are surrounded by their own class. None without a class between."""
    y = target[:PICTURES]
    if y.dim() != 3 or min(y.shape[1:]) < 8:
        return None
    known = y[y != ignore]
    if known.numel() < y.numel() // 2 or int(known.max() - known.min()) < 2:
        return None
    low, high = int(known.min()), int(known.max())
    thin = wide = jumps = 0
    for v in (y, y.mT):
        left, here, right = v[..., :-2], v[..., 1:-1], v[..., 2:]
        valid = (left != ignore) & (here != ignore) & (right != ignore) & (here > low)
        for one, other in ((left, right), (right, left)):
            up = valid & (other > here)
            thin, wide = thin + int((up & (one < here)).sum()), wide + int((up & (one == here)).sum())
        valid = (v[..., 1:] != ignore) & (v[..., :-1] != ignore)
        jumps += int((valid & ((v[..., 1:] - v[..., :-1]).abs() >= 2)).sum())
    centre = y[:, 1:-1, 1:-1]
    between = (centre > low) & (centre < high) & (centre != ignore)
    solid = between.clone()
    for other in (y[:, :-2, 1:-1], y[:, 2:, 1:-1], y[:, 1:-1, :-2], y[:, 1:-1, 2:]):
        solid &= other == centre
    return [thin, wide, jumps, int(between.sum()), int(solid.sum())]


def fault(rows: list[dict[str, Any]]) -> Fault | None:
    """Return what is wrong with the class maps of a loss's calls."""
    found = [r["seams"] for r in rows if r.get("seams")]
    if len(found) < CALLS:
        return None
    thin, wide, jumps, between, solid = (sum(f[i] for f in found) for i in range(5))
    if thin < max(LEAST, THIN * wide, jumps) or solid < SOLID * between:
        return None
    return (
        f"between two classes of the target maps a border of one pixel has the class between their numbers at {thin:,} places, none is at {jumps:,}, "
        "and elsewhere that class is an area of its own",
        "class numbers were interpolated when the maps were resized or turned: use the nearest neighbour (Image.NEAREST, "
        "InterpolationMode.NEAREST, order=0)",
    )
