"""Class imbalance: class weights, repetition of samples, or focal loss, which gives hard samples more weight."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from trainworthy.recipes.vision.data.pictures import Labelled

from trainworthy import core


@dataclass
class Balance:
    """Balancing of classes of unequal size."""

    by: Literal["none", "weights", "sampler", "focal"] = "none"
    """Class weights of 1 / size, equally many samples of each class by repeating those of small classes, or focal loss (Lin 2017)."""
    gamma: float = 2.0
    """Gamma of focal loss: the weight of a sample is (1 - p)^gamma."""
    ratio: float = 1.0
    """Remove training samples by class until sizes fall exponentially to 1 / ratio (Cui 2019), to test balancing. Validation samples stay."""


def thinned(found: Labelled, ratio: float) -> Labelled:
    """Return fewer training samples: of class c of n the first `size * ratio^(-c / (n - 1))`."""
    if ratio < 1:
        raise core.UserError("--balance.ratio is the largest class over the smallest", got=ratio, needed=">= 1")
    if ratio == 1:
        return found
    n = len(found.classes)
    own = [found.learn[found.labels[found.learn] == c] for c in range(n)]
    kept = [i[: max(1, round(len(i) * ratio ** (-c / (n - 1))))] for c, i in enumerate(own)]
    return found._replace(learn=torch.cat(kept))


class Even(core.Data):
    """`data` with as many samples of each class as the largest has. Repeated samples get new random draws."""

    def __init__(self, data: core.Data, labels: Tensor):
        self.data, self.fields, self.notes = data, data.fields, data.notes
        own = [(labels == c).nonzero().flatten() for c in labels.unique().tolist()]
        most = max(map(len, own))
        self.places = torch.stack([i[torch.arange(most) % len(i)] for i in own], 1).flatten().tolist()

    def __len__(self) -> int:
        return len(self.places)

    def get(self, index: int, generator: torch.Generator | None) -> dict[str, Any]:
        return self.data.get(self.places[index], generator)

    def identity(self, index: int) -> bytes | str | None:
        return self.data.identity(self.places[index])

    def peek(self, index: int, key: str) -> Any:
        return self.data.peek(self.places[index], key)

    def source_class(self, index: int) -> str | None:
        return self.data.source_class(self.places[index])

    def source_name(self, index: int) -> str | None:
        return self.data.source_name(self.places[index])


def smoothing(cfg: Any) -> float:
    """Return the label smoothing. Focal loss has none: smoothing would counteract (1 - p)^gamma."""
    return 0.0 if cfg.balance.by == "focal" else cfg.label_smoothing


class Parts(NamedTuple):
    """What balancing changes in a stage."""

    loss: Callable | None
    """The loss; None: plain cross-entropy."""
    counts: Callable
    first_loss: float
    """Loss of an untrained net, in nats."""
    floor: float
    """Lowest possible loss: the entropy of a smoothed target."""
    uneven: bool
    """Whether a class has less than half of the training samples of the largest one."""


def repeated(balance: Balance, data: core.Data, labels: Tensor) -> core.Data:
    """Training data."""
    return Even(data, labels) if balance.by == "sampler" else data


def build(balance: Balance, labels: Tensor, n: int, smoothing: float, *, mixed: bool) -> Parts:
    """Return the changes for training samples of these labels (N,), of `n` classes."""
    if balance.by != "none" and mixed:
        raise core.UserError("--balance.by and --mix do not go together", got=balance.by, needed="one of them",
                             cause="a mixed picture has two classes")  # fmt: skip

    def focal(model: nn.Module, batch: dict) -> dict[str, Tensor]:
        nll = F.cross_entropy(model(batch["image"]).float(), batch["label"], reduction="none")
        return {"ce": ((1 - (-nll).exp()) ** balance.gamma * nll).sum()}

    def weighed(model: nn.Module, batch: dict) -> dict[str, Tensor]:
        """Weight each sample by its class, including the smoothing term, so that the loss floor does not change."""
        logits, label = model(batch["image"]).float(), batch["label"]
        each = F.cross_entropy(logits, label, label_smoothing=smoothing, reduction="none")
        return {"ce": (weight.to(each)[label] * each).sum()}

    weight = len(labels) / (n * torch.bincount(labels, minlength=n).clamp_min(1))  # (n,); mean 1 over the samples
    target = [1 - smoothing + smoothing / n, *[smoothing / n] * (n - 1)]
    floor, first = -sum(p * math.log(p) for p in target if p > 0), math.log(n)
    plain = lambda batch: {"*": len(batch["label"])}  # noqa: E731
    often = torch.bincount(labels)
    uneven = bool(2 * often[often > 0].min() < often.max())
    if balance.by == "focal":
        return Parts(focal, plain, (1 - 1 / n) ** balance.gamma * first, floor, uneven)
    if balance.by == "weights":
        own = lambda batch: {"ce": weight.to(batch["image"].device)[batch["label"]].sum()}  # noqa: E731
        return Parts(weighed, own, first, floor, uneven)
    return Parts(None, plain, first, floor, uneven)
