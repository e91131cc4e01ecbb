"""The formula of a classifier's loss: known mistakes are named, objectives of a user's own that pull to the target are let through."""

import contextlib
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from trainworthy.core.base import modes
from trainworthy.core.gates.checks import formula
from trainworthy.core.recipe.stage import Expect, Field
from trainworthy.recipes.vision.gates import objective

N = 10
CFG = SimpleNamespace(label_smoothing=0.1, balance=SimpleNamespace(by="none", gamma=2.0))


class Labels:
    """Training labels: so many of each class."""

    def __init__(self, sizes: Sequence[int] = (2,) * N):
        self.fields = {"label": Field("target", classes=[str(c) for c in range(N)])}
        self.labels = [c for c, n in enumerate(sizes) for _ in range(n)]

    def __len__(self) -> int:
        return len(self.labels)

    def peek(self, index: int, key: str) -> int:
        return self.labels[index]


EVEN = {"train": Labels()}


def compared(loss, *, cfg=CFG, more=None, moved: float = 0.6, terms=None, data=EVEN) -> formula.Comparison:
    """Of a loss of logits (B, N) and labels (B,) at a net that has moved."""
    torch.manual_seed(0)
    net = nn.Linear(12, N)
    nn.init.normal_(net.weight, std=moved)
    if moved < 0.1:
        nn.init.zeros_(net.bias)
    batch = {"image": torch.randn(8, 12), "label": torch.arange(8)} | (more or {})
    stage = SimpleNamespace(
        model=net, expect=Expect(), data=data, loss=terms or (lambda m, b: {"ce": loss(m(b["image"]), b["label"])})
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


def test_poly_of_a_net_that_hardly_moved_is_no_multiple_of_another_loss():
    """It was "1.39 times cross-entropy with label smoothing 0.2": with nearly equal scores the two differ by less than the tolerance."""
    for moved in (0.02, 0.03, 0.05):
        assert compared(lambda x, y: (nll(x, y) + 1 - sure(x, y)).sum(), moved=moved).wrong == []
        assert compared(lambda x, y: -(nll(x, y) + 1 - sure(x, y)).sum(), moved=moved).wrong


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


def test_logit_adjustment_adds_the_logarithms_of_the_shares():
    sizes = [20 - 2 * c for c in range(N - 1)] + [1]
    shares = (torch.tensor(sizes) / sum(sizes)).log()
    for sign, words in ((1, "logit adjustment"), (-1, "subtracted from the logits")):
        found = compared(
            lambda x, y, sign=sign: F.cross_entropy(x + sign * shares, y, label_smoothing=0.1, reduction="sum"),
            data={"train": Labels(sizes)},
        )
        assert bool(found.wrong) is (sign < 0)
        assert words in " ".join([*found.remarks, *found.causes])


def test_mixed_pictures_have_mixed_targets():
    torch.manual_seed(0)
    net, share = nn.Linear(12, N), torch.linspace(0.5, 0.95, 8)
    batch = {"image": torch.randn(8, 12), "label": torch.arange(8), "label2": torch.arange(8).flip(0), "lam": share}
    target = share[:, None] * F.one_hot(batch["label"], N) + (1 - share[:, None]) * F.one_hot(batch["label2"], N)
    due = F.cross_entropy(net(batch["image"]), target, label_smoothing=0.1, reduction="none")
    stated = objective.classify(SimpleNamespace(cfg=CFG), SimpleNamespace(model=net, data=EVEN), batch)["ce"]
    assert torch.allclose(next(iter(stated.right.values())), due)


# ---------------------------------------------------------------------------------------------------------- segmentation
VOID = 255


def segmented(**terms) -> formula.Comparison:
    """Of loss terms of logits (B, 3, 8, 8) and masks with void; the statement has cross-entropy and Dice."""
    torch.manual_seed(0)
    net = nn.Conv2d(3, 3, 1)
    nn.init.normal_(net.weight, std=1.0)
    mask = torch.zeros(8, 8, 8, dtype=torch.long)
    mask[:, 2:4, 2:6], mask[:4, 6, 6], mask[:, :, 7] = 1, 2, VOID
    batch = {"image": torch.randn(8, 3, 8, 8), "mask": mask}

    def loss(model, batch):
        logits = model(batch["image"])
        return {k: f(logits, batch["mask"]) for k, f in terms.items()}

    stage = SimpleNamespace(model=net, expect=Expect(), loss=loss)
    run = SimpleNamespace(autocast=contextlib.nullcontext, precision="fp32")
    cfg = SimpleNamespace(focal=0.0, dice=1.0)
    return formula.compared(run, stage, batch, lambda: objective.segment(SimpleNamespace(cfg=cfg), stage, batch))


def pixels(x, y, **how):
    return F.cross_entropy(x, y, ignore_index=VOID, reduction="none", **how)


def ce(x, y):
    return pixels(x, y).sum()


def regions(x, y):
    """(true, missed, extra) probability of each class of each window, and which classes occur, (B, n) each."""
    known = (y != VOID)[:, None]
    truth = F.one_hot(y.where(y != VOID, 0), x.shape[1]).permute(0, 3, 1, 2) * known
    p = x.softmax(1) * known
    true, there, predicted = ((a.flatten(2).sum(2)) for a in (p * truth, truth, p))
    return true, there - true, predicted - true, there > 0


def tversky(x, y, power=1.0):
    true, missed, extra, there = regions(x, y)
    return ((1 - true / (true + 0.7 * missed + 0.3 * extra).clamp_min(1)) ** power * there).sum()


def jaccard(x, y):
    true, missed, extra, there = regions(x, y)
    return ((1 - true / (true + missed + extra).clamp_min(1)) * there).sum()


def smoothed_dice(x, y):
    true, missed, extra, there = regions(x, y)
    return ((1 - (2 * true + 1) / (2 * true + missed + extra + 1)) * there).sum()


def log_cosh_dice(x, y):
    true, missed, extra, there = regions(x, y)
    return ((1 - 2 * true / (2 * true + missed + extra).clamp_min(1)).cosh().log() * there).sum()


def by_class(*weights):
    return lambda x, y: pixels(x, y, weight=torch.tensor(weights)).sum()


def hardest(x, y):
    each = pixels(x, y)
    return each[each > each.median()].sum()


@pytest.mark.parametrize(
    "terms",
    [
        {"ce": ce, "dice": tversky},
        {"ce": ce, "dice": lambda x, y: tversky(x, y, 0.75)},  # focal Tversky
        {"ce": ce, "tversky": tversky},
        {"ce": ce, "dice": jaccard},
        {"ce": ce, "dice": smoothed_dice},
        {"ce": ce, "dice": log_cosh_dice},
        {"ce": by_class(0.4, 1.0, 3.0), "dice": tversky},
        {"ce": lambda x, y: (pixels(x, y) + 1 - (-pixels(x, y)).exp()).sum(), "dice": tversky},  # poly-1
        {"ce": hardest, "dice": tversky},
    ],
)
def test_region_losses_and_weights_of_a_users_own_are_let_through(terms):
    assert segmented(**terms).wrong == []


@pytest.mark.parametrize(
    ("terms", "words"),
    [
        ({"ce": lambda x, y: pixels(x, y).clamp_max(0.7).sum(), "dice": tversky}, "the loss is clamped"),
        ({"ce": by_class(3.0, 1.0, 0.4), "dice": tversky}, "the most frequent class 0 counts more than the rarest, 2"),
        ({"ce": by_class(1.0, 1.0, 0.0), "dice": tversky}, "class 2 gets no gradient"),
        ({"ce": ce, "dice": lambda x, y: -tversky(x, y)}, "pushed away"),
        ({"ce": ce, "dice": lambda x, y: tversky(x, y.where(y != VOID, 0))}, "void pixels change the loss"),
        ({"ce": ce, "dice": lambda x, y: tversky(x, y.roll(2, 1))}, "pushed away"),
        ({"ce": ce, "dice": lambda x, y: tversky(x.sigmoid(), y)}, ""),
        ({"ce": ce}, "it is zero, or missing"),
        ({"ce": lambda x, y: pixels(x, y.where(y == VOID, 2 - y)).sum(), "dice": tversky}, "pushed away"),
    ],
)
def test_mistakes_in_terms_of_a_users_own_are_found(terms, words):
    found = segmented(**terms)
    assert found.wrong or not words, found.remarks
    assert words in " ".join(found.causes + found.wrong)


def test_noise_on_gradients_is_quiet():
    """A hook that draws at random is no part of the loss (Neelakantan 2015); another one stays."""
    hooks = []

    def hooked(model, batch):
        if not hooks:
            hooks.append(model.weight.register_hook(lambda g: g + 0.1 * torch.randn_like(g)))
        return {"ce": F.cross_entropy(model(batch["image"]), batch["label"], label_smoothing=0.1, reduction="sum")}

    assert not compared(None, terms=hooked).wrong
    p = nn.Parameter(torch.ones(3))
    p.register_hook(lambda g: 2 * g)
    drawing = p.register_hook(lambda g: g + torch.rand_like(g))
    with modes.without_random_hooks([p]):
        assert torch.autograd.grad(p.sum(), p)[0].tolist() == [2, 2, 2]
    assert torch.autograd.grad(p.sum(), p)[0].min() > 2
    drawing.remove()
    assert torch.autograd.grad(p.sum(), p)[0].tolist() == [2, 2, 2]
