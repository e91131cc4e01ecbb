"""Looks at penalties on gradients and at normalised embeddings: are they taken for each sample, or over the whole batch?"""

from typing import Any

import torch
from torch import Tensor
from trainworthy.core.base.doubles import to_double
from trainworthy.guard.measures.records import on_gradient

LOOKS = 40
EXACT = 1e-3  # of a derivative that is left, as a part of it


def multiple(gradient: Tensor, by: Tensor, axis: int) -> tuple[Tensor, float]:
    """Return the multiples of G (N, D) along an axis that are nearest to a derivative by it, and what is left, as a part of it."""
    times = (gradient * by).sum(axis, keepdim=True) / gradient.pow(2).sum(axis, keepdim=True).clamp_min(1e-30)
    return times, float((by - times * gradient).norm() / by.norm().clamp_min(1e-30))


class Penalties:
    """Gradients that a loss contains, and embeddings that were normalised along the batch."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, float, float]] = []
        """The loss's derivative by a gradient G, as a multiple of G: mean and spread over the samples; the norm of G."""
        self.columns: list[float] = []
        """The multiple of G\'s first column that a derivative is, where it is none of G\'s rows."""
        self.along_batch: set[int] = set()  # number of rows
        self.squares = 0

    def gradient(self, found: Any) -> None:
        """Note a gradient with a graph: a loss will hold it."""
        for g in found if isinstance(found, (tuple, list)) else ():
            if isinstance(g, Tensor) and g.requires_grad and g.dim() > 1 and len(g) >= 8 and len(self.rows) < LOOKS:
                kept = g.detach()

                def derived(by: Tensor, kept: Tensor = kept) -> None:
                    flat, other = to_double(kept.flatten(1)), to_double(by.detach().flatten(1))
                    times, rest = multiple(flat, other, 1)
                    if rest < EXACT:
                        self.rows.append((float(times.mean()), float(times.std()), float(flat.norm())))
                    elif flat.shape[1] > 1:
                        times, rest = multiple(flat, other, 0)
                        self.columns += [float(times[0, 0])] * (rest < EXACT)

                on_gradient(g, derived)

    def normalized(self, x: Tensor, dim: Any) -> None:
        """Note an embedding (N, D) that is normalised along N."""
        if dim == 0 and x.dim() == 2 and x.requires_grad and not x.is_leaf:
            self.along_batch.add(len(x))

    def scored(self, logits: Tensor) -> None:
        """Note a cross-entropy over similarities of such embeddings."""
        self.squares += logits.dim() == 2 and logits.shape[0] == logits.shape[1] and len(logits) in self.along_batch


def penalty(one: Penalties) -> tuple[str, str] | None:
    """Find a penalty (|G| - 1)^2 whose norm is that of the whole batch: its derivative is a (1 - 1 / |G|) G, with the same
    factor for every sample and another one at every step."""
    times = torch.tensor(one.columns, dtype=torch.float64)
    varied = len(times) >= 6 and float(times.std()) > EXACT * float(times.abs().mean())  # an energy has constant ones
    if varied and not one.rows:
        return (
            "a penalty brings the norm of each column of the gradient to 1, over the samples of the batch",
            "norm(dim=0) runs over the samples: the gradient of each sample has a norm of its own (dim=1, after flattening)",
        )
    rows = [r for r in one.rows if abs(1 - 1 / r[2]) > 0.05]  # nearer to 1 there is nothing to measure
    if len(rows) < 6 or any(spread > 1e-3 * abs(mean) for mean, spread, _ in rows):
        return None
    mean, inverse = (torch.tensor(x, dtype=torch.float64) for x in ([r[0] for r in rows], [1 / r[2] for r in rows]))
    ratio = mean / (1 - inverse)
    if float(inverse.std()) > 1e-3 and float(mean.std()) > 1e-3 * float(mean.abs().mean()) and float(
        (ratio - ratio.median()).abs().max()
    ) < 0.01 * float(ratio.median().abs()):  # fmt: skip
        return (
            "a penalty brings the norm of the whole batch's gradient to 1, not each sample's",
            "norm() without dim: the gradient of each sample has a norm of its own (dim=1, after flattening)",
        )
    return None


def embeddings(one: Penalties) -> tuple[str, str] | None:
    """Find embeddings that are compared with each other and normalised along the batch."""
    if one.squares >= 4:
        return (
            f"{one.squares} losses compare embeddings that are normalised along the batch (dim=0)",
            "each embedding has a length of its own: F.normalize(z, dim=1)",
        )
    return None
