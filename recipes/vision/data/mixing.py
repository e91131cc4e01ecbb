"""Pictures mixed in pairs: mixup (Zhang 2018, arXiv 1710.09412) and CutMix (Yun 2019, arXiv 1905.04899).

Every draw is made in the sample, so no cut of a batch, no process and no resume changes a mixture. The sample's own picture
always has the larger share `lam` >= 1/2, so `label` stays the hard answer and gates and metrics need not know of mixing. For mixup
nothing is lost: the pair (a, b, lam) is the pair (b, a, 1 - lam). For CutMix the order does matter: the partner's rectangle is at
most half of the picture here, where the paper's may be any part of it (a small rest of the own picture around a large rectangle
never occurs).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainworthy import core

SURE = 0.6  # from this share on, a model that has learnt the mixture surely names its own picture's class


@dataclass
class Mix:
    """Pictures mixed in pairs while training."""

    mixup: float = 0.0
    """Alpha of mixup (Zhang 2018; 0.2 is usual); 0 mixes nothing."""
    cutmix: float = 0.0
    """Alpha of CutMix (Yun 2019; 1.0 is usual); with mixup too, each sample draws which of the two it gets."""

    @property
    def on(self) -> bool:
        return self.mixup > 0 or self.cutmix > 0

    def __post_init__(self):
        if self.mixup < 0 or self.cutmix < 0:
            raise core.UserError(
                "--mix.mixup and --mix.cutmix are alphas of a Beta distribution",
                got=(self.mixup, self.cutmix),
                needed=">= 0",
            )


class Mixed(core.Data):
    """`data` with, on the training path, each picture mixed with another one: of the whole set, or of `near(index)`.

    Adds `label2` (the partner's class) and `lam` (the own share, 1 on the evaluation path).
    """

    def __init__(self, data: core.Data, mix: Mix, near: Callable[[int], range] | None = None):
        self.data, self.mix, self.near = data, mix, near
        self.fields, self.notes = data.fields, data.notes

    def __len__(self) -> int:
        return len(self.data)

    def get(self, index: int, generator: torch.Generator | None) -> dict[str, Any]:
        own = self.data.get(index, generator)
        if generator is None:
            return {**own, "label2": own["label"], "lam": torch.ones(())}
        among = self.near(index) if self.near else range(len(self))
        other = self.data.get(among[int(torch.randint(len(among), (), generator=generator))], generator)
        cut = self.mix.mixup == 0 or (self.mix.cutmix > 0 and torch.rand((), generator=generator) < 0.5)
        alpha = torch.tensor(self.mix.cutmix if cut else self.mix.mixup)
        lam = torch.distributions.Beta(
            alpha, alpha
        ).sample()  # draws from torch's global generator, which is the one we are handed
        lam = torch.maximum(lam, 1 - lam)
        if cut:
            image, lam = pasted(own["image"], other["image"], lam, generator)
        else:
            image = lam * own["image"] + (1 - lam) * other["image"]
        return {**own, "image": image, "label2": other["label"], "lam": lam}

    def identity(self, index: int) -> bytes | str | None:
        return self.data.identity(index)

    def peek(self, index: int, key: str) -> Any:
        return self.data.peek(index, key)

    def source_class(self, index: int) -> str | None:
        return self.data.source_class(index)

    def order(self, *parts: int | str) -> Tensor:
        return self.data.order(*parts)


def pasted(image: Tensor, other: Tensor, lam: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(image (C, H, W) with a rectangle of `other` of about 1 - lam of its area, what is left of it as a share)."""
    height, width = image.shape[-2:]
    side = (1 - lam).sqrt()
    h, w = int(height * side), int(width * side)
    top = int(torch.randint(height - h + 1, (), generator=generator))
    left = int(torch.randint(width - w + 1, (), generator=generator))
    image = image.clone()
    image[:, top : top + h, left : left + w] = other[:, top : top + h, left : left + w]
    return image, torch.tensor(1 - h * w / (height * width))


def soft(batch: dict[str, Tensor], n_classes: int) -> Tensor:
    """(B, n_classes) target probabilities: `lam` on the own class, the rest on the partner's."""
    own, other = (torch.nn.functional.one_hot(batch[k], n_classes) for k in ("label", "label2"))
    lam = batch["lam"][:, None]
    return lam * own + (1 - lam) * other


def floor(batch: dict[str, Tensor], n_classes: int, smoothing: float) -> float:
    """Lowest cross-entropy there is on this batch: the mean entropy of its smoothed targets, in nats."""
    p = soft(batch, n_classes).double() * (1 - smoothing) + smoothing / n_classes
    return torch.special.entr(p).sum(1).mean().item()


def sure(batch: dict[str, Tensor]) -> float:
    """Share of the batch whose own class a perfect model names for sure; a half-and-half mixture may go either way."""
    alike = batch["label"] == batch["label2"]
    return ((batch["lam"] >= SURE) | alike).double().mean().item()
