"""Scores of generated pictures against real ones, in a judge's features."""

import torch
from torch import Tensor


def frechet(a: Tensor, b: Tensor) -> float:
    """Frechet distance (Heusel 2017) of two sets of features (N, D), (M, D), each taken as a Gaussian: squared distance of the
    means + tr(A + B - 2 sqrt(AB)). It grows as samples get fewer: compare sets of one size only."""
    a, b = a.double(), b.double()
    cov_a, cov_b = torch.cov(a.T), torch.cov(b.T)
    values, vectors = torch.linalg.eigh(cov_a)
    root = vectors * values.clamp_min(0).sqrt() @ vectors.T
    cross = torch.linalg.eigvalsh(root @ cov_b @ root).clamp_min(0).sqrt().sum()
    return float((a.mean(0) - b.mean(0)).square().sum() + cov_a.trace() + cov_b.trace() - 2 * cross)
