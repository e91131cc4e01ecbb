"""What losses and scores of a mask can be expected: of a perfect answer, of one that knows the class frequencies alone."""

import torch
from torch import Tensor
from torch.nn import functional as F
from trainworthy.core.base.doubles import to_double
from trainworthy.recipes.vision.data.mask_files import IGNORE


def outlines(mask: Tensor, reach: int) -> Tensor:
    """Return the pixels within `reach` of another class, (B, H, W) bool."""
    void = mask == IGNORE
    pool = lambda x: F.max_pool2d(x.float()[:, None], 2 * reach + 1, 1, reach)[:, 0]  # noqa: E731
    return (pool(mask.masked_fill(void, -1)) > -pool(-mask.masked_fill(void, IGNORE))) & ~void


def answered(mask: Tensor, own: Tensor, n: int, *, focal: float, dice: float) -> float:
    """Return the loss if each pixel's true class has probability `own` (B, H, W) and the other classes share the rest equally."""
    scored, other, losses = mask != IGNORE, (1 - own) / (n - 1), []
    ce = -((1 - own) ** focal * own.log())[scored].mean()
    for c in range(n):
        mine = mask == c
        both, truth = (own * mine).flatten(1).sum(1), mine.flatten(1).sum(1)
        predicted = both + (other * (scored & ~mine)).flatten(1).sum(1)
        losses.append((1 - 2 * both / (predicted + truth).clamp_min(1))[truth > 0])
    return (ce + dice * torch.cat(losses).mean()).item()


def unsure(mask: Tensor, n: int) -> Tensor:
    """Return the uniform probability 1 / n for each pixel, (B, H, W): an untrained net."""
    return torch.full(mask.shape, 1 / n, device=mask.device)


def sure_inside(mask: Tensor, reach: int) -> Tensor:
    """Return probability 1 for each pixel, and 0.5 within `reach` of an outline, where annotations are not exact; (B, H, W)."""
    return torch.where(outlines(mask, reach), 0.5, 1.0)


def close(mask: Tensor, n: int, reach: int) -> Tensor:
    """Return the IoU of each class if a quarter of its outline pixels are wrong, (n,); NaN for a class that does not occur."""
    edge, mine = outlines(mask, reach), [mask == c for c in range(n)]
    all_, wrong = (to_double(torch.stack([m.sum() for m in ms])) for ms in (mine, [m & edge for m in mine]))
    return (all_ - wrong / 4) / (all_ + wrong / 4)
