"""Scores of a class loss: views that mix classes and places, cosines without a temperature, scores (B, C, T); rates that are squared."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from trainworthy.guard.checks import causality
from trainworthy.guard.measures import rates
from trainworthy.guard.measures.losses.logits import Logits


def told(make) -> str:
    one = Logits()
    for _ in range(6):
        one.note(make())
    return (one.fault() or ("",))[0]


def test_views_of_scores():
    conv, linear = nn.Conv1d(4, 5, 1), nn.Linear(4, 5)
    x = torch.randn(3, 4, 7)
    assert "view of (3, 5, 7)" in told(lambda: conv(x).reshape(-1, 5))
    assert not told(lambda: conv(x).transpose(1, 2).reshape(-1, 5))
    assert not told(lambda: linear(x.transpose(1, 2)).view(-1, 5))
    assert not told(lambda: linear(x.mean(2)))
    assert not told(lambda: linear(x[:, :, :5].transpose(1, 2)).view(-1, 5))  # as many places as classes
    pictures = nn.Conv2d(4, 5, 1)
    assert "view of (2, 5, 6, 6)" in told(lambda: pictures(torch.randn(2, 4, 6, 6)).reshape(-1, 5))
    assert not told(lambda: pictures(torch.randn(2, 4, 6, 6)).permute(0, 2, 3, 1).reshape(-1, 5))


def test_views_with_classes_on_the_second_axis():
    linear, conv = nn.Linear(4, 3), nn.Conv1d(4, 3, 1)
    x = torch.randn(5, 7, 4)
    assert "view of (5, 7, 3)" in told(lambda: linear(x).view(5, 3, 7))
    assert "view of (35, 3)" in told(lambda: linear(x.reshape(35, 4)).view(5, 3, 7))
    assert "view of (2, 6, 6, 3)" in told(lambda: linear(torch.randn(2, 6, 6, 4)).reshape(2, 3, 6, 6))
    assert not told(lambda: linear(x).transpose(1, 2))
    assert not told(lambda: conv(x.transpose(1, 2)).view(5, 3, 7, 1))
    assert not told(lambda: nn.Linear(4, 21)(x[:, 0]).view(5, 3, 7))  # one score for each class and place
    assert not told(lambda: linear(x[:, 0]).view(5, 3, 1))


def test_cosines():
    net = nn.Linear(6, 12)
    a, b = (lambda: F.normalize(net(torch.randn(16, 6)), dim=1)), (lambda: F.normalize(net(torch.randn(16, 6)), dim=1))
    assert "cosines, between -1 and 1, of 16" in told(lambda: a() @ b().T)
    assert told(lambda: (a() @ b().T).T)
    assert not told(lambda: (a() @ b().T / 0.1).t())
    assert not told(lambda: a() @ b().T / 0.1)
    assert not told(lambda: (a() / 0.1) @ b().T)
    assert not told(lambda: net(torch.randn(16, 6)) @ b().T)
    assert not told(lambda: a()[:4] @ b()[:4].T)  # few candidates
    weight = nn.Parameter(torch.randn(10, 12))
    assert "of 10" in told(lambda: F.linear(a(), F.normalize(weight, dim=1)))
    assert not told(lambda: 30 * F.linear(a(), F.normalize(weight, dim=1)))


@pytest.mark.parametrize(("pad", "sees"), [((2, 0), False), ((1, 1), True)])
def test_scores_with_classes_first(pad, sees):
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.conv, self.head = nn.Embedding(9, 8), nn.Conv1d(8, 8, 3), nn.Conv1d(8, 9, 1)

        def forward(self, ids):
            return self.head(self.conv(F.pad(self.embedding(ids).transpose(1, 2), pad)))

    rows = torch.randint(0, 9, (8, 13))
    ids, target = rows[:, :-1].contiguous(), rows[:, 1:]
    some = target.clone()
    some[:, -4:] = -1  # not scored
    for y in (target, some):
        seen = SimpleNamespace(shifted=(Net(), (ids,), {}, y.flatten(), ids))
        assert bool(causality.sees_ahead(seen)["cause"]) == sees


@pytest.mark.parametrize(("function", "base", "wrong"), [
    (lambda k: 1e-2 * min(1.0, (k + 1) / 20), 1e-2, True),
    (lambda k: min(1.0, (k + 1) / 20), 1e-2, False),
    (lambda k: 0.95**k, 1e-2, False),
    (lambda k: 1e-2 * 0.5 ** (k // 30), 1.0, False),
    (lambda k: 3e-3 * min((k + 1) / 50, (50 / (k + 1)) ** 0.5), 1e-3, True),  # a rate, and the base is one
    (lambda k: min(1.0, (k + 1) / 1e5), 1e-3, False),  # a long warm-up
    (lambda k: 16**-0.5 * min((k + 1) ** -0.5, (k + 1) * 40**-1.5), 1.0, False),
])  # fmt: skip
def test_a_rate_for_a_factor(function, base: float, wrong: bool):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], base)
    one = SimpleNamespace(it=torch.optim.lr_scheduler.LambdaLR(optimizer, function))
    assert bool(rates.squared(one)) == wrong
