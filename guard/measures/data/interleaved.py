"""Finds pictures (N, C, H, W) that are pictures (N, H, W, C) read in another order: reshape() where a transpose() is meant.

The values of one place are then next to each other in a row, and a row of the picture is spread over several. Laid out as (H, W, C) again,
such pictures are smoother both down and across; right ones become rougher.
"""

from torch import Tensor
from trainworthy.guard.hooks.trees import first_float

CHANNELS, SIDE, SAMPLES = (2, 4), 8, 8
# Noise gives 1, right pictures less; stripes of the channels' period give much in one direction alone
DOWN, ACROSS = 1.15, 1.05


def roughness(x: Tensor, axis: int) -> Tensor:
    """Return the mean difference of neighbours along an axis of each of the pictures (N, C, H, W)."""
    return x.diff(dim=axis).abs().flatten(1).mean(1)


def interleaved(x: Tensor) -> float:
    """Return how much rougher the pictures are, down a column, than the same values as (H, W, C), in all but a tenth of them; 0 where they are
    not rougher across, too, or where `x` is no batch of pictures with two to four channels."""
    if x.dim() != 4 or not x.is_floating_point() or len(x) < SAMPLES or not CHANNELS[0] <= x.shape[1] <= CHANNELS[1]:
        return 0.0
    n, c, h, w = x.shape
    if min(h, w) < SIDE:
        return 0.0
    given = x.detach().float().contiguous()
    meant = given.reshape(n, h, w, c).permute(0, 3, 1, 2)
    down, across = (roughness(given, axis) / roughness(meant, axis).clamp_min(1e-12) for axis in (2, 3))
    if not bool((down.isfinite() & across.isfinite()).all()) or float(across.median()) < ACROSS:
        return 0.0
    return float(down.quantile(0.1))


def fault(call: tuple | None) -> tuple[str, str] | None:
    """Return what is wrong with the pictures that a model was called with (module, args, kwargs), and its cause."""
    if call is None:
        return None
    _, args, kwargs = call
    x = first_float(args, kwargs)
    if x is None or (rougher := interleaved(x)) < DOWN:
        return None
    return (
        f"pictures {tuple(x.shape)} are {rougher:.2g} times as rough as the same values laid out as (H, W, C)",
        "reshape() or view() where permute() or transpose() is meant: the channels of a place became neighbours in a row",
    )
