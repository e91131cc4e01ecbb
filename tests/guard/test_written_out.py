"""Cross-entropies that are written by hand: their targets are class numbers of the batch."""

import pytest

from tests.conftest import patched
from tests.guard.guarding import guard

SMOOTHED = """
import torch
from torch import nn
from torch.nn import functional as F

def cal_loss(pred, gold, eps=0.2):
    n_class = pred.size(1)
    one_hot = torch.zeros_like(pred).scatter(1, gold.view(-1, 1), 1)
    one_hot = one_hot * (1 - eps) + (1 - one_hot) * eps / (n_class - 1)
    log_prb = F.log_softmax(pred, dim=1)
    return -(one_hot * log_prb).sum(dim=1).mean()

torch.manual_seed(0)
x = torch.randn(400, 12)
y = x[:, :4].argmax(1)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 32, shuffle=True)
model = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(40):
    for a, b in loader:
        optimizer.zero_grad()
        cal_loss(model(a), b).backward()
        optimizer.step()
"""
GATHERED = ("return -(one_hot * log_prb).sum(dim=1).mean()", "return -log_prb.gather(1, gold.view(-1, 1)).mean()")


@pytest.mark.parametrize("changes", [[], [GATHERED]], ids=["smoothed", "gathered"])
def test_a_loss_that_is_written_by_hand_is_memorised(changes, tmp_path):
    verdicts, printed, _ = guard(patched(SMOOTHED, *changes) if changes else SMOOTHED, tmp_path)
    assert verdicts["overfit"].verdict == "pass", printed
    assert not [v for v in verdicts.values() if v.blocks], printed
    broken = patched(SMOOTHED, *changes, ("cal_loss(model(a), b)", "cal_loss(model(torch.zeros_like(a)), b)"))
    verdicts, printed, _ = guard(broken, tmp_path)
    assert [v.id for v in verdicts.values() if v.blocks], printed


def test_soft_targets_are_no_class_numbers(tmp_path):
    """The targets of a mixed batch are recognised as those of neither of its samples."""
    part, other = (
        "cal_loss(model(0.4 * a + 0.6 * a.flip(0)), b)",
        "cal_loss(model(0.4 * a + 0.6 * a.flip(0)), b.flip(0))",
    )
    mixed = patched(SMOOTHED, ("cal_loss(model(a), b)", f"(0.4 * {part} + 0.6 * {other})"))
    verdicts, printed, _ = guard(mixed, tmp_path)
    assert not [v for v in verdicts.values() if v.blocks], printed
