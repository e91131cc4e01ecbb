"""Rules of `names` on noise levels, masked entries, averages that nothing reads, and means that are divided by samples."""

from pathlib import Path

import pytest
from trainworthy.guard.checks import names

DIFFUSION = """
import torch
betas = torch.linspace(1e-4, 0.02, 100)
alpha_bars = torch.cumprod(1 - betas, 0)

def q_sample(x0, t, noise):
    bar = alpha_bars[t][:, None]
    return {mix}

def sample(model, x):
    for i in reversed(range(100)):
        var = {var}
        x = model(x, i) + {scale} * torch.randn_like(x)
    return x

print(sample(q_sample, q_sample(torch.ones(1), 3, torch.ones(1))))
"""
RIGHT = {"mix": "bar.sqrt() * x0 + (1 - bar).sqrt() * noise", "var": "betas[i]", "scale": "var.sqrt()"}
MASKED = """
import torch
from torch.nn import functional as F
def f(a, b, same, scores):
    distance = torch.cdist(a, b)
    return {value}
print(f(1, 2, 3, 4))
"""
AVERAGED = """
import copy
def update_ema(ema, model): ...
def evaluate(model): ...
def main(model):
    ema = copy.deepcopy(model).requires_grad_(False)
    ema.eval()
    for _ in range(3):
        update_ema(ema, model)
    print(evaluate({used}))
main(1)
"""
SUMMED = """
import torch
from torch import nn
from torch.nn import functional as F
criterion = nn.CrossEntropyLoss({given})
def evaluate(model, loader):
    total, count, batches = 0.0, 0, 0
    for x, y in loader:
        loss = {loss}
        total += {added}
        count += {counted}
    return total / count
print(evaluate(1, 2))
"""
PLAIN = {"given": "", "loss": "criterion(model(x), y)", "added": "loss.item()", "counted": "len(y)"}


def verdict(folder: Path, text: str) -> str:
    """What the check says of a script: its cause, or nothing."""
    script = folder / "script.py"
    script.write_text(text)
    found = names.check(script)
    return "" if found.get("ok", True) else f"{found['measured']}; {found['cause']}"


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({}, ""),
        ({"scale": "var ** 0.5"}, ""),
        ({"var": "betas[i].sqrt()", "scale": "var"}, ""),
        ({"scale": "var"}, "multiplies noise by `var`, a variance"),
        ({"mix": "bar * x0 + (1 - bar) * noise"}, "mixes a sample and its noise by `bar`"),
        ({"mix": "(1 - alpha_bars[t]) * noise + alpha_bars[t] * x0"}, "mixes a sample and its noise"),
        ({"mix": "t * x0 + (1 - t) * noise"}, ""),  # a straight path
    ],
)
def test_levels_of_noise(tmp_path: Path, change: dict, wrong: str):
    found = verdict(tmp_path, DIFFUSION.format(**(RIGHT | change)))
    assert (wrong in found) if wrong else not found, found


@pytest.mark.parametrize(
    ("value", "wrong"),
    [
        ('distance.masked_fill(same, float("inf")).min(1)', ""),
        ("distance.masked_fill(~same, 0.0).max(1)", ""),
        ("scores.masked_fill(same, 0.0).min(1)", ""),  # it may be below 0
        ("scores.masked_fill(same, -1e9).softmax(-1)", ""),
        ("F.softmax(scores.masked_fill(same, -torch.inf), -1)", ""),
        ("distance.masked_fill(same, 0.0).min(dim=1).values", "always the least distance"),
        ("distance.masked_fill(same, -float('inf')).argmin(1)", "always the least"),
        ("scores.masked_fill(same, 1e9).max(1)", "always the largest"),
        ("scores.masked_fill(same == 0, 0).softmax(-1)", "keep their share of the softmax"),
        ("F.softmax(scores.masked_fill(same == 0, 1e-9), dim=-1)", "keep their share of the softmax"),
    ],
)
def test_masked_entries_that_win(tmp_path: Path, value: str, wrong: str):
    found = verdict(tmp_path, MASKED.format(value=value))
    assert (wrong in found) if wrong else not found, found


@pytest.mark.parametrize(
    ("used", "wrong"), [("ema", ""), ("ema.eval()", ""), ("model", "is updated in line 9 and never read")]
)
def test_an_average_that_nothing_reads(tmp_path: Path, used: str, wrong: str):
    found = verdict(tmp_path, AVERAGED.format(used=used))
    assert (wrong in found) if wrong else not found, found


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({}, True),
        ({"loss": "F.cross_entropy(model(x), y)", "counted": "y.numel()"}, True),
        ({"added": "loss.item() * len(y)"}, False),
        ({"given": 'reduction="sum"'}, False),
        ({"loss": 'F.cross_entropy(model(x), y, reduction="sum")'}, False),
        ({"counted": "1"}, False),
    ],
)
def test_means_of_batches_over_samples(tmp_path: Path, change: dict, wrong: bool):
    found = verdict(tmp_path, SUMMED.format(**(PLAIN | change)))
    assert ("a sum of the means of batches" in found) if wrong else not found, found
