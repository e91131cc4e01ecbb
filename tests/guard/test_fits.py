"""Losses without class numbers on eight samples, the order of targets, printed scores, and classes that are numbered anew."""

import json

import pytest
from trainworthy.guard.checks import interventions

from tests.conftest import patched
from tests.guard.guarding import guard

NUMBERS = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
x = torch.randn(768, 8)
y = 2 * x[:, 0] - x[:, 1] * x[:, 2] + 0.1 * torch.randn(768)
train = DataLoader(TensorDataset(x[:512], y[:512]), 32, shuffle=True)
valid = DataLoader(TensorDataset(x[512:], y[512:]), 64)
model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), 3e-3)
for epoch in range(30):
    model.train()
    for a, b in train:
        loss = F.mse_loss(model(a).squeeze(1), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        p, t = (torch.cat(v) for v in zip(*[(model(a).squeeze(1), b) for a, b in valid]))
    print(f"epoch {epoch} R2: {1 - ((p - t) ** 2).sum() / ((t - t.mean()) ** 2).sum():.3f}")
"""
LOSS = "F.mse_loss(model(a).squeeze(1), b)"
BINARY = patched(
    NUMBERS,
    ("+ 0.1 * torch.randn(768)", "+ 0.1 * torch.randn(768)\ny = (y > 0).float()"),
    (LOSS, "F.binary_cross_entropy_with_logits(model(a).squeeze(1), b)"),
    (
        'R2: {1 - ((p - t) ** 2).sum() / ((t - t.mean()) ** 2).sum():.3f}"',
        'AUC {(p[t > 0.5][:, None] > p[t < 0.5]).float().mean():.3f}"',
    ),
)
CLASSES = patched(
    NUMBERS,
    (
        "+ 0.1 * torch.randn(768)",
        "+ 0.1 * torch.randn(768)\ny = torch.bucketize(y, torch.tensor([-2.0, -0.7, 0.7, 2.0]))",
    ),
    ("nn.Linear(64, 1)", "nn.Linear(64, 5)"),
    (LOSS, "F.cross_entropy(model(a), b)"),
    ("range(30)", "range(60)"),
    ("model(a).squeeze(1), b) for", "model(a).argmax(1), b) for"),
    ('R2: {1 - ((p - t) ** 2).sum() / ((t - t.mean()) ** 2).sum():.3f}"', 'accuracy {(p == t).float().mean():.3f}"'),
)
SHORT = patched(NUMBERS, ("range(30)", "range(9)"))
BUGS = {
    "rolled targets": (NUMBERS, LOSS, "F.mse_loss(model(a).squeeze(1), b.roll(1))", "targets", "indexed alone"),
    "inputs shuffled": (NUMBERS, LOSS, "F.l1_loss(model(a[torch.randperm(32)]).squeeze(1), b)", "targets", "indexed alone"),
    "rolled classes": (CLASSES, "F.cross_entropy(model(a), b)", "F.cross_entropy(model(a), b.roll(1))", "targets", "indexed alone"),
    "input lost": (NUMBERS, "F.mse_loss(model(a)", "F.mse_loss(model(a.mean(0, keepdim=True).expand_as(a))", "overfit", "does not reach"),
    "outputs shuffled": (NUMBERS, LOSS, "F.mse_loss(model(a).squeeze(1)[torch.randperm(32)], b)", "overfit", "inside the loop"),
    "sorted targets": (SHORT, "+ 0.1 * torch.randn(768)", "+ 0.1 * torch.randn(768)\ny = y[torch.randperm(768)]", "signal", "in the data"),
    "other unit": (NUMBERS, "{1 - ((p - t)", "{1 - ((p - (40 * t + 150))", "metric", "another unit"),
    "inverted score": (BINARY, "[:, None] > p", "[:, None] < p", "metric", "wrong sign"),
    "numbered anew": (CLASSES, "TensorDataset(x[512:], y[512:])", "TensorDataset(x[512:], (y[512:] + 2) % 5)", "learning", "number their classes"),
}  # fmt: skip
QUICK = ("rolled targets", "other unit", "inverted score")


def broken(name: str) -> str:
    source, old, new, *_ = BUGS[name]
    return patched(source, (old, new))


def stops(name: str, folder, seed: int) -> None:
    *_, check, words = BUGS[name]
    verdicts, output, _ = guard(broken(name), folder, seed=seed, **{"--seconds": "1"})
    assert verdicts[check].verdict == "fail", output
    assert words in output


@pytest.mark.parametrize("name", QUICK)
def test_guard_stops_a_loss_without_classes(name, tmp_path):
    """At the guard's own seed."""
    stops(name, tmp_path, 0)


@pytest.mark.verify
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("name", BUGS)
def test_guard_stops_every_loss_without_classes(name, seed, tmp_path):
    """The script's own seed moves with the guard's."""
    *_, check, words = BUGS[name]
    source = patched(broken(name), ("manual_seed(1)", f"manual_seed({seed})"))
    verdicts, output, _ = guard(source, tmp_path, seed=seed, **{"--seconds": "1"})
    assert verdicts[check].verdict == "fail", output
    assert words in output


@pytest.mark.parametrize("source", [NUMBERS, BINARY], ids=["numbers", "binary"])
def test_guard_learns_from_a_loss_without_classes(source, tmp_path):
    """Eight samples close the loss, and the printed score agrees."""
    verdicts, output, _ = guard(source, tmp_path, **{"--seconds": "1"})
    assert not [v for v in verdicts.values() if v.blocks], output
    assert verdicts["overfit"].verdict == verdicts["metric"].verdict == "pass", output


def test_wiring_does_not_say_that_zero_gradients_move_anything(tmp_path):
    """The loss is multiplied by zero."""
    source = patched(NUMBERS, (LOSS, f"1 + 0 * {LOSS}"))
    verdicts, output, _ = guard(source, tmp_path, interventions=False, **{"--seconds": "0.3"})
    assert verdicts["gradients"].verdict == "fail", output
    assert "gradients and move" not in verdicts["wiring"].measured, output
    assert "no gradient other than zero" in verdicts["wiring"].measured, output


def test_seed_of_the_guard(tmp_path):
    """It reaches a script that sets none; one that does keeps its own."""
    losses = []
    for own, seed in (("", 3), ("", 3), ("", 4), ("torch.manual_seed(1)", 3), ("torch.manual_seed(1)", 4)):
        source = patched(NUMBERS, ("torch.manual_seed(1)", own), ("range(30)", "range(1)"))
        guard(source, tmp_path, interventions=False, seed=seed, **{"--seconds": "0.1"})
        found = json.loads((tmp_path / "out" / "gates.json").read_text())
        losses.append(found["watched"]["facts"]["trend"])
    assert losses[0] == losses[1] != losses[2], losses
    assert losses[3] == losses[4], losses


def _two_losses(steps: int, leaves: int) -> tuple[dict, dict]:
    """Losses on eight samples that fall to the best constant, 1.7; with their own inputs they fall on from step `leaves`."""
    others = [1.7 + 0.6 * 0.95**i for i in range(steps)]
    own = [b - min(1.6, 0.004 * max(0, i - leaves) ** 1.5) for i, b in enumerate(others)]
    return {"nll": own, "train_accuracy": [0.5] * steps}, {"nll": others}


@pytest.mark.parametrize(("steps", "leaves", "result"), [(129, 110, "skip"), (129, 200, "cause"), (387, 110, "ok")])
def test_a_net_that_learns_the_best_constant_first(steps: int, leaves: int, result: str):
    """A small CNN of a public notebook with weights of deviation 0.01: it was stopped at the step at which its loss began to close."""
    own, others = _two_losses(steps, leaves)
    found = interventions.overfit(own, others)
    assert found.get(result), found
    assert bool(interventions.hasty(found, {"facts": own})) == (result == "cause")
