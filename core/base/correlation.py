"""How strongly two series of numbers go together."""

from collections.abc import Sequence

import torch
from torch import Tensor
from trainworthy.core.base.doubles import to_double


def pearson(a: Tensor | Sequence[float], b: Tensor | Sequence[float]) -> float:
    """Return Pearson's correlation of two series (N,); 0 where one is constant."""
    x, y = (v - v.mean() for v in (to_double(torch.as_tensor(v).detach().flatten()) for v in (a, b)))
    size = float(x.norm() * y.norm())
    return float(x @ y) / size if size > 0 else 0.0


def spearman(a: Tensor, b: Tensor) -> float:
    """Return Spearman's correlation of the ranks of two series (N,); equal values share theirs. 0 where one is constant."""
    return pearson(_ranks(a), _ranks(b))


def _ranks(values: Tensor) -> Tensor:
    _, place, n = values.detach().flatten().unique(return_inverse=True, return_counts=True)
    return (n.cumsum(0).double() - n / 2)[place]
