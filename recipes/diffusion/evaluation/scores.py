"""Scores of generated images: the class that a classifier sees in them, and their distance from real ones in its features."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from trainworthy.core import Data, Matrix, Run, Tile
from trainworthy.core.base.doubles import to_double
from trainworthy.core.loop.run import evaluating
from trainworthy.core.recipe.stage import View
from trainworthy.recipes.diffusion.data.pictures import tiles
from trainworthy.recipes.shared.classifier import Classifier
from trainworthy.recipes.vision.data.pictures import Labelled


@dataclass
class Sampling:
    """How images are sampled in evaluations, and the defaults of the export."""

    guidance_scale: float = 2.0
    """Classifier-free guidance scale; 1: no guidance (Ho & Salimans 2022)."""
    num_inference_steps: int = 25
    """Steps of the sampler: DDIM (Song 2021), or Euler's method for a flow."""
    every: int = 5
    """Evaluations sample one image for every n-th validation image, with its class or caption and its noise."""
    scales: tuple[float, ...] = (1.0, 1.5, 2.0, 4.0)
    """Guidance scales of the table at the end."""


def frechet(a: Tensor, b: Tensor) -> float:
    """Return the Frechet distance (Heusel 2017) of two sets of features (N, D), (M, D), each taken as a Gaussian: squared distance of the
    means + tr(A + B - 2 sqrt(AB)). It grows with fewer samples, so compare sets of equal size only."""
    a, b = to_double(a), to_double(b)
    cov_a, cov_b = torch.cov(a.T), torch.cov(b.T)
    values, vectors = torch.linalg.eigh(cov_a)
    root = vectors * values.clamp_min(0).sqrt() @ vectors.T
    cross = torch.linalg.eigvalsh(root @ cov_b @ root).clamp_min(0).sqrt().sum()
    return float((a.mean(0) - b.mean(0)).square().sum() + cov_a.trace() + cov_b.trace() - 2 * cross)


def moments(pictures: Tensor) -> Tensor:
    """Return mean and mean square of each image (B, C, H, W): (B, 2)."""
    flat = to_double(pictures.flatten(1))
    return torch.stack([flat.mean(1), flat.square().mean(1)], 1)


def light(each: Tensor) -> Tensor:
    """Return mean and standard deviation over all pixels of images with these `moments`, (2,)."""
    mean, square = each.mean(0)
    return torch.stack([mean, (square - mean**2).clamp_min(0).sqrt()])


def _split(data: Data) -> str:
    """Return the split of a data set; a gate's view belongs to the split of its data."""
    while isinstance(data, View):
        data = data.data
    return getattr(data, "split", "val")


class Scores:
    """Scores of samples by `classifier`: one for each `every`-th image of a split, of its class, from its noise."""

    def __init__(self, run: Run, classifier: Classifier, found: Labelled, sample: Callable[..., Tensor], every: int):
        """`sample(model, classes (B,), noise (B, C, H, W), scale)` returns images (B, C, H, W) in [-1, 1]."""
        self.run, self.classifier, self.found, self.sample, self.every = run, classifier, found, sample, every
        self.real, self.curve = cache(self._real), cache(self._curve)
        self.rows = {"val": found.held_out, "test": found.test}
        self.real_moments = cache(lambda split: moments(found.images[self.rows[split]]))

    def measured(self, model: nn.Module, data: Data, scale: float) -> dict[str, float]:
        """Return the share of samples that show the requested class, their Frechet distance from real images of the split, and differences
        in mean and standard deviation (`light`), which a digit classifier ignores."""
        split = _split(data)
        # At least two: one sample has no covariance.
        some = View(data, range(0, len(data), min(self.every, max(1, len(data) - 1))))
        made = ((b["label"], self.sample(model, b["condition"], b["noise"], scale)) for b in self.run.batches(some))
        rows = [(label, *self.classifier(pictures), moments(pictures)) for label, pictures in made]
        truth, predicted, features, each = (self.run.gather(torch.cat(part)) for part in zip(*rows, strict=True))
        right = (predicted == truth).float().mean().item()
        brighter, richer = (light(each.cpu()) - light(self.real_moments(split))).tolist()
        return {
            "agreement": right,
            "frechet": frechet(features, self.real(split)[1]),
            "brighter": brighter,
            "richer": richer,
        }

    def _real(self, which: str) -> tuple[Tensor, Tensor]:
        """Return (class (N,), features (N, D)) of real images: as many training images as samples, each class by its share."""
        learn, labels = self.found.learn, self.found.labels
        by_class = learn[labels[learn].argsort(stable=True)]
        some = by_class[:: max(1, len(learn) * self.every // len(self.found.held_out))]
        chosen = some if which == "learnt from" else self.rows[which]
        pictures = (self.found.images[i].to(self.run.device) for i in chosen.split(256))
        predicted, features = zip(*map(self.classifier, pictures), strict=True)
        return torch.cat(predicted), torch.cat(features)

    def _curve(self, average: nn.Module | None, raw: nn.Module, data: Data, scales: tuple[float, ...]) -> Matrix:
        """Return the table by weights and guidance scale, with real images in the last row."""
        found = {}
        for name, net in {**({"average": average} if average else {}), "raw": raw}.items():
            with evaluating(net):
                found |= {f"{name} weights, guidance {scale:g}": self.measured(net, data, scale) for scale in scales}
        predicted, features = self.real("val")
        agreement = (predicted.cpu() == self.found.labels[self.found.held_out]).float().mean().item()
        found["real pictures"] = {"agreement": agreement, "frechet": frechet(self.real("learnt from")[1], features)}
        values = torch.tensor([[s["agreement"], s["frechet"]] for s in found.values()])
        return Matrix(values, list(found), ("agreement", "Frechet distance"), axes=("samples", "score"))

    def grid(self, model: nn.Module, data: Data, scale: float) -> list[Tile]:
        """Return four samples of each of the first ten classes, from fixed noise in the shape of that of `data`."""
        labels = torch.arange(min(len(self.found.classes), 10), device=self.run.device).repeat_interleave(4)
        shape = data.peek(0, "noise").shape
        noise = torch.randn(len(labels), *shape, generator=torch.Generator().manual_seed(0))
        return self.make_tiles(self.sample(model, labels, noise.to(self.run.device), scale), labels)

    def make_tiles(self, made: Tensor, labels: Tensor) -> list[Tile]:
        """Return samples with the requested class, and whether the classifier sees it."""
        right = (self.classifier(made)[0] == labels).float().tolist()
        return tiles(made, [self.found.classes[c] for c in labels.tolist()], right)
