"""The formula of a classifier's loss: known mistakes are named, objectives of a user's own that pull to the target are let through."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from trainworthy.core.gates.checks import formula
from trainworthy.core.recipe.stage import Expect
from trainworthy.recipes.vision.gates import objective

N = 10
CFG = SimpleNamespace(label_smoothing=0.1, balance=SimpleNamespace(by="none", gamma=2.0))


def compared(loss, *, cfg=CFG, more=None) -> formula.Comparison:
    """Of a loss of logits (B, N) and labels (B,) at a net that has moved."""
    torch.manual_seed(0)
    net = nn.Linear(12, N)
    nn.init.normal_(net.weight, std=0.6)
    batch = {"image": torch.randn(8, 12), "label": torch.arange(8)} | (more or {})
    stage = SimpleNamespace(
        model=net, expect=Expect(), loss=lambda m, b: {"ce": loss(m(b["image"]), b["label"])}
    )  # fmt: skip
    run = SimpleNamespace(autocast=contextlib.nullcontext, precision="fp32")
    return formula.compared(run, stage, batch, lambda: objective.classify(SimpleNamespace(cfg=cfg), stage, batch))


def nll(x, y):
    return F.cross_entropy(x, y, reduction="none")


def sure(x, y):
    return (-nll(x, y)).exp()


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1, reduction="sum"),
        lambda x, y: 0.5 * F.cross_entropy(x, y, reduction="sum"),
        lambda x, y: ((1 - sure(x, y)) ** 2 * nll(x, y)).sum(),
        lambda x, y: ((1 - sure(x, y)) ** 1.5 * nll(x, y)).sum(),
        lambda x, y: ((1 - sure(x, y) ** 0.7) / 0.7).sum(),  # generalised cross-entropy
        lambda x, y: (nll(x, y) + 1 - sure(x, y)).sum(),  # poly-1
        lambda x, y: F.binary_cross_entropy_with_logits(x, F.one_hot(y, N).float(), reduction="sum"),
        lambda x, y: (x.softmax(1) - F.one_hot(y, N)).square().sum(),  # Brier
        lambda x, y: F.multi_margin_loss(x, y, reduction="sum"),
        lambda x, y: nll(x + torch.linspace(0, 2, N), y).sum(),  # logits adjusted by class frequencies
        lambda x, y: nll(x / 2, y).sum(),
        lambda x, y: (nll(x, y) * torch.linspace(0.2, 3, N)[y]).sum(),
        lambda x, y: F.cross_entropy(x, y, label_smoothing=0.37, reduction="sum"),
        lambda x, y: nll(x - 0.5 * F.one_hot(y, N), y).sum(),  # a margin on the own class
    ],
)
def test_objectives_of_a_users_own_are_let_through(loss):
    assert compared(loss).wrong == []


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda x, y: (sure(x, y) ** 2 * nll(x, y)).sum(), "the focal weight is p^2"),
        (lambda x, y: (sure(x, y) ** 1.7 * nll(x, y)).sum(), "pushed away from their own class"),
        (lambda x, y: F.cross_entropy(x.softmax(1), y, label_smoothing=0.1, reduction="sum"), "softmax is taken twice"),
        (lambda x, y: nll(x, (y + 1) % N).sum(), "pushed away from their own class"),
        (lambda x, y: F.cross_entropy(x, (y + 1) % N, label_smoothing=0.1, reduction="sum"), "classes are one off"),
        (lambda x, y: -nll(x, y).sum(), "sign"),
        (lambda x, y: (nll(x.detach(), y) + 0 * x.sum(1)).sum(), "detach()"),
        (lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1), "mean"),
    ],
)
def test_mistakes_are_named(loss, words):
    found = compared(loss)
    assert found.wrong
    assert words in " ".join(found.causes + found.wrong)


def test_mixed_pictures_have_mixed_targets():
    torch.manual_seed(0)
    net, share = nn.Linear(12, N), torch.linspace(0.5, 0.95, 8)
    batch = {"image": torch.randn(8, 12), "label": torch.arange(8), "label2": torch.arange(8).flip(0), "lam": share}
    target = share[:, None] * F.one_hot(batch["label"], N) + (1 - share[:, None]) * F.one_hot(batch["label2"], N)
    due = F.cross_entropy(net(batch["image"]), target, label_smoothing=0.1, reduction="none")
    stated = objective.classify(SimpleNamespace(cfg=CFG), SimpleNamespace(model=net), batch)["ce"]
    assert torch.allclose(next(iter(stated.right.values())), due)
