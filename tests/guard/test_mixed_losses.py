"""mixup with two losses on one output: `overfit` follows the sum that is minimised, not each loss alone."""

from types import SimpleNamespace

import pytest
import torch
from trainworthy.guard.measures.losses import mixing

from tests.guard.guarding import guard

MIXUP = """
import sys
import numpy as np
import torch
from torch import nn

seed = int(sys.argv[1])
torch.manual_seed(seed)
np.random.seed(seed)
centres = 2 * torch.randn(6, 20)
y = torch.randint(0, 6, (480,))
x = centres[y] + torch.randn(480, 20)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 32, shuffle=True)
net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 6))
optimizer = torch.optim.Adam(net.parameters(), 3e-3)
criterion = nn.CrossEntropyLoss()
for epoch in range(30):
    for a, b in loader:
        lam = np.random.beta(0.2, 0.2)
        # labels
        order = torch.randperm(len(a))
        out = net(lam * a + (1 - lam) * a[order])
        loss = lam * criterion(out, b) + (1 - lam) * criterion(out, b[order])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"loss {loss.item():.3f}")
"""


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.verify)])
def test_two_losses_of_mixed_inputs_count_by_their_weights(tmp_path, seed: int):
    verdicts, printed, _ = guard(MIXUP, tmp_path / "right", str(seed))
    assert verdicts["overfit"].verdict == "pass", printed
    wrong = MIXUP.replace("# labels", "b = b[torch.randperm(len(b))]")
    verdicts, printed, _ = guard(wrong, tmp_path / "wrong", str(seed))
    assert verdicts["overfit"].verdict == "fail", printed


def losses(weights: list[float], targets: list[int], vector: bool) -> list[dict]:
    """The rows of losses on one output, weighed as given."""
    rows, terms = [], []
    for k, (w, home) in enumerate(zip(weights, targets, strict=True)):
        out = torch.full((4,) if vector else (), float(k + 1), requires_grad=True) * 1.0
        rows.append(
            {"step": 0, "since": 0, "scores": 7, "home": home, "nll": float(k + 1), "right": 4 * k, "scored": 4}
        )
        mixing.weigh(rows[-1], out)
        terms.append(w * out.mean())
    sum(terms).backward()
    return rows


@pytest.mark.parametrize("vector", [False, True])
def test_losses_with_other_targets_become_one(vector: bool):
    [one] = mixing.pooled(losses([0.25, 0.75], [1, 2], vector))
    assert one["nll"] == pytest.approx(1.75)
    assert one["right"] == pytest.approx(3)


def test_losses_of_other_kinds_stay_apart():
    same = losses([0.5, 0.5], [1, 1], vector=False)
    later = [row | {"step": k} for k, row in enumerate(losses([0.5, 0.5], [1, 2], vector=False))]
    unknown = [{"step": 0, "since": 0, "scores": 7, "home": k, "nll": 1.0, "right": 1, "scored": 4} for k in (1, 2)]
    for rows in (same, later, unknown):
        assert mixing.pooled(rows) == rows
    mixing.weigh({}, SimpleNamespace())  # a loss that is no tensor
