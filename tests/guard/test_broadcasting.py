"""Columns (N, 1) that meet rows (N,) in a loss, and matrices of all pairs that are meant."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from trainworthy.guard.hooks import events, patches
from trainworthy.guard.observing.observer import Observer
from trainworthy.guard.rehearsals.control import Control, Plan

from tests.conftest import patched
from tests.guard.guarding import guard

REGRESSION = """
import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(256, 6)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1)), 32, shuffle=True)
model, criterion = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1)), nn.MSELoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(5):
    for a, b in loader:
        optimizer.zero_grad()
        loss = criterion(model(a).squeeze(1), b)
        loss.backward()
        optimizer.step()
"""


def test_a_column_of_predictions_and_a_row_of_targets(tmp_path):
    broken = patched(REGRESSION, ("model(a).squeeze(1)", "model(a)"))
    verdicts, printed, _ = guard(broken, tmp_path, interventions=False)
    assert "mse_loss of (32, 1) and (32,) became (32, 32)" in verdicts["targets"].measured, printed
    verdicts, printed, _ = guard(REGRESSION, tmp_path, interventions=False)
    assert verdicts["targets"].verdict != "fail", printed


def value(x, y, net):
    return F.smooth_l1_loss(net(x), y)


def advantage(x, y, net):
    gain = y - net(x).detach()
    gain = (gain - gain.mean()) / gain.std()
    ratio = (net(x).squeeze(1) - 0.1).exp()
    return -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean() - 0.01 * net(x).mean()


def weighted(x, y, net):
    return -(net(x).squeeze(1) * y[:, None]).mean()


def bootstrapped(x, y, net):
    with torch.no_grad():
        goal = y[:, None] + 0.9 * net(x.flip(0)).squeeze(1)
    return F.mse_loss(net(x), goal)


def by_hand(x, y, net):
    return 0.5 * ((net(x) - y) ** 2).mean() + net(x).abs().mean()


def pairs(x, y, net):
    s = net(x).squeeze(1)
    return ((1 - (s[:8, None] - s[8:])).clamp(min=0) ** 2).mean()


def energy(x, y, net):
    s = net(x)
    return 2 * (s - y).abs().mean() - (s - s.squeeze(1)).abs().mean()


def centres(x, y, net):
    near = torch.exp(-((net(x) - torch.linspace(0, 1, len(x))) ** 2))
    return F.mse_loss(near.mean(1), y)


def scaled(x, y, net):
    return F.mse_loss(y[:, None] * net.scale, torch.ones(len(y), len(y)))


def baseline(x, y, net):
    return ((net(x).squeeze(1) - y.mean()) ** 2).mean() + F.l1_loss(net(x), y[:1])


def kernel(x, y, net):
    return (net(x) * torch.exp(-((y[:, None] - y[None]) ** 2))).mean()


LOSSES = {
    True: (value, advantage, weighted, bootstrapped, by_hand),
    False: (pairs, energy, centres, scaled, baseline, kernel),
}


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize(("loss", "stopped"), [(f, k) for k, found in LOSSES.items() for f in found])
def test_losses_of_all_pairs(loss, stopped: bool):
    torch.manual_seed(0)
    seen = Observer(Control(Plan("watch"), print))
    events.install(seen)
    try:
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        net.scale = nn.Parameter(torch.ones(16))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for _ in range(5):
            optimizer.zero_grad()
            loss(torch.randn(16, 4), torch.randn(16), net).backward()
            optimizer.step()
    finally:
        patches.remove()
    assert seen.evidence.error == ""
    assert bool(seen.evidence.outer.fault()) == stopped
