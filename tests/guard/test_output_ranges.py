"""Targets that the last layer cannot reach, and a score that gets its predictions in another order than its labels."""

import pytest
from trainworthy.guard.checks import progress

from tests.guard.guarding import guard
from tests.guard.test_progress import printed, run

SCRIPT = """
import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(256, 6)
y = TARGET
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 6), LAST)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 32, shuffle=True)
for epoch in range(3):
    for a, b in loader:
        optimizer.zero_grad()
        loss = nn.functional.LOSS(model(a).view(-1), b.reshape(-1))
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.4f}")
"""
WRONG = [("x.tanh()", "nn.Sigmoid()", "mse_loss"), ("(x - x.mean(0)) / x.std(0)", "nn.ReLU()", "smooth_l1_loss"),
         ("255 * x.sigmoid()", "nn.Sigmoid()", "l1_loss"), ("3 * x", "nn.Tanh()", "mse_loss")]  # fmt: skip
HEALTHY = [("x.sigmoid()", "nn.Sigmoid()", "mse_loss"), ("x.abs()", "nn.ReLU()", "mse_loss"), ("x.tanh()", "nn.Tanh()", "l1_loss"),
           ("x.relu() - 0.01", "nn.Softplus()", "mse_loss"), ("x", "nn.Identity()", "mse_loss")]  # fmt: skip


@pytest.mark.parametrize("case", WRONG, ids=" ".join)
def test_targets_out_of_reach(case, tmp_path):
    verdicts, shown = guarded(case, tmp_path)
    assert verdicts["loss-input"].verdict == "fail", shown
    assert "targets are outside" in shown


@pytest.mark.parametrize("case", HEALTHY[:4], ids=" ".join)
def test_targets_within_reach(case, tmp_path):
    verdicts, shown = guarded(case, tmp_path)
    assert verdicts["loss-input"].verdict != "fail", shown


def guarded(case, tmp_path):
    target, last, loss = case
    verdicts, shown, _ = guard(
        SCRIPT.replace("TARGET", target).replace("LAST", last).replace("LOSS", loss), tmp_path, interventions=False
    )
    return verdicts, shown


def test_a_score_that_contradicts_the_evaluation_is_called_misread():
    ours, others = run(printed("val f1", 0.2, 0.0)), run(printed("val f1", 0.2, 0.2))
    fitting = {"eval_correlation": [(0.79, 684)]}
    found = progress.check(ours, lambda *plans: [ours if n == "trained" else others for n, _ in plans], 1.0, fitting)
    assert found["cause"].startswith("the model's outputs in the evaluation fit their targets (correlation 0.79)")


def test_targets_in_another_unit_are_named_where_the_score_gets_worse():
    ours, others = run(printed("test psnr", 4.6, 4.6)), run(printed("test psnr", 25.2, 25.2))
    for unit, named in ((255.0, True), (1 / 255, True), (1.3, False)):
        found = progress.check(
            ours, lambda *plans: [ours if n == "trained" else others for n, _ in plans], 1.0, {"unit": unit}
        )
        assert not found["ok"]
        assert ("another unit" in found["cause"]) is named
