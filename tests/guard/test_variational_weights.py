"""A reconstruction that is a mean over entries beside a KL term that is a sum: the weights, from the gradients of a loss."""

import pytest
import torch
from torch.nn import functional as F
from trainworthy.guard.measures.losses.variational import averaged

N, D = 16, 400


def judged(form, kl_of_a_sample: float) -> bool:
    """The verdict on a reconstruction's loss of (N, D) outputs, beside a KL term with this weight for one sample."""
    torch.manual_seed(0)
    x, made = torch.rand(N, D).round(), torch.randn(N, D, requires_grad=True)
    form(made, x).backward()
    return averaged(made.detach(), made.grad, kl_of_a_sample)


def summed(made, x):
    return F.binary_cross_entropy_with_logits(made, x, reduction="sum")


@pytest.mark.parametrize(
    ("form", "weight"),
    [
        (F.binary_cross_entropy_with_logits, 1.0),  # the KL term is a sum over samples
        (F.binary_cross_entropy_with_logits, 1 / N),  # the mean over samples of a sum over codes
        (F.binary_cross_entropy_with_logits, 4 / N),
        (F.mse_loss, 1 / N),
        (lambda made, x: F.binary_cross_entropy_with_logits(made, x) / 8, 1 / N / 8),
    ],
)
def test_a_mean_over_entries_is_outweighed(form, weight):
    assert judged(form, weight)


@pytest.mark.parametrize(
    ("form", "weight"),
    [
        (summed, 1.0),
        (lambda made, x: summed(made, x) / N, 1 / N),
        (lambda made, x: summed(made, x) / N, 20 / N),  # a beta-VAE
        (F.mse_loss, 0.0025 / N),  # a small weight for the KL term
        (F.mse_loss, 1 / N / D),  # both are means
    ],
)
def test_matching_sums_and_small_weights_are_healthy(form, weight):
    assert not judged(form, weight)
