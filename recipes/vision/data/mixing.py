"""Images mixed in pairs: mixup (Zhang 2018, arXiv 1710.09412) and CutMix (Yun 2019, arXiv 1905.04899).

All random draws belong to the sample, so a mixture does not depend on the batch, the process or a resume. The sample's own image always
has the larger share `lam` >= 1/2, so `label` stays the hard answer, and gates and metrics work as without mixing. For mixup this loses
nothing: the pair (a, b, lam) equals (b, a, 1 - lam). CutMix becomes a restricted version: the partner's rectangle covers at most half of
the image, where the paper allows any part.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from trainworthy.core.base.doubles import to_double

from trainworthy import core

SURE = 0.6  # share from which a model that has learnt the mixture names its own image's class with certainty


@dataclass
class Mix:
    """Mixing of training images in pairs."""

    mixup: float = 0.0
    """Alpha of mixup (Zhang 2018; usually 0.2); 0: off."""
    cutmix: float = 0.0
    """Alpha of CutMix (Yun 2019; usually 1.0). With mixup also on, each sample draws one of the two."""

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
    """`data` whose training images are mixed with another one, from the whole set or from `near(index)`.

    Adds `label2` (the partner's class) and `lam` (the own share, 1 in evaluation).
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
        lam = torch.distributions.Beta(alpha, alpha).sample()  # torch's global generator, seeded per sample
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

    def source_name(self, index: int) -> str | None:
        return self.data.source_name(index)

    def order(self, *parts: int | str) -> Tensor:
        return self.data.order(*parts)


def pasted(image: Tensor, other: Tensor, lam: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return (image (C, H, W) with a rectangle of `other` of about 1 - lam of its area, remaining share)."""
    height, width = image.shape[-2:]
    side = (1 - lam).sqrt()
    h, w = int(height * side), int(width * side)
    top = int(torch.randint(height - h + 1, (), generator=generator))
    left = int(torch.randint(width - w + 1, (), generator=generator))
    image = image.clone()
    image[:, top : top + h, left : left + w] = other[:, top : top + h, left : left + w]
    return image, torch.tensor(1 - h * w / (height * width))


def soft(batch: dict[str, Tensor], n_classes: int) -> Tensor:
    """Return target probabilities (B, n_classes): `lam` for the own class, the rest for the partner's."""
    own, other = (torch.nn.functional.one_hot(batch[k], n_classes) for k in ("label", "label2"))
    lam = batch["lam"][:, None]
    return lam * own + (1 - lam) * other


def floor(batch: dict[str, Tensor], n_classes: int, smoothing: float) -> float:
    """Return the lowest possible cross-entropy on this batch: the mean entropy of its smoothed targets, in nats."""
    p = to_double(soft(batch, n_classes)) * (1 - smoothing) + smoothing / n_classes
    return torch.special.entr(p).sum(1).mean().item()


def sure(batch: dict[str, Tensor]) -> float:
    """Return the share of the batch whose own class a perfect model names with certainty."""
    alike = batch["label"] == batch["label2"]
    return to_double((batch["lam"] >= SURE) | alike).mean().item()
