"""Faults that people posted about: each is named, and what looks like it passes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from trainworthy.guard.checks import forced
from trainworthy.guard.checks.causality import DEAD, sees_ahead
from trainworthy.guard.checks.results import finding, skip
from trainworthy.guard.checks.run_checks import symptoms_last
from trainworthy.guard.checks.schedules import zeroed
from trainworthy.guard.measures.data.interleaved import fault, interleaved
from trainworthy.guard.measures.losses.regression import Regression
from trainworthy.guard.source.reading import read
from trainworthy.guard.source.splits import again

from tests.guard.guarding import guard

SHAPES = [(2, 8, 8), (3, 24, 32), (4, 12, 9)]


def pictures(c: int, h: int, w: int) -> torch.Tensor:
    """Noisy discs (N, H, W, C) on slopes, other ones in each channel."""
    torch.manual_seed(0)
    y, x = torch.arange(h).view(1, h, 1, 1), torch.arange(w).view(1, 1, w, 1)
    centre, slope = torch.rand(16, 2, 1, 1, c), torch.rand(16, 1, 1, c)
    disc = ((y - centre[:, 0] * h) ** 2 + (x - centre[:, 1] * w) ** 2 < (h / 3) ** 2).float()
    return disc + slope * x / w + 2 * slope.flip(3) + 0.1 * torch.randn(16, h, w, c)


@pytest.mark.parametrize("shape", SHAPES)
def test_pictures_reshaped_to_channels_first_are_found(shape: tuple[int, int, int]) -> None:
    right = pictures(*shape)
    wrong = right.reshape(16, *shape)
    found = fault((nn.Identity(), (wrong,), {}))
    assert found is not None
    assert "permute() or transpose()" in found[1]
    assert fault((nn.Identity(), (right.permute(0, 3, 1, 2),), {})) is None


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["noise", "classes", "stripes", "rows", "flat"])
def test_other_pictures_are_not(shape: tuple[int, int, int], kind: str) -> None:
    torch.manual_seed(0)
    c, h, w = shape
    noise = torch.randn(16, *shape)
    x = {
        "noise": noise,
        "classes": nn.functional.one_hot(torch.randint(c, (16, h, w)), c).permute(0, 3, 1, 2).float(),
        "stripes": (torch.arange(w) % c).expand(16, *shape) + 0.1 * noise,
        "rows": (torch.arange(h) % c).view(h, 1).expand(16, *shape) + 0.1 * noise,
        "flat": torch.zeros(16, *shape),
    }[kind]
    assert interleaved(x) < 1.1


class Decoder(nn.Module):
    """Attention that shifts its labels itself. `mode`: causal, open, or normalised over the queries."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode, self.tokens = mode, nn.Embedding(12, 16)
        self.qkv, self.head = nn.Linear(16, 48), nn.Linear(16, 12)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = self.qkv(self.tokens(ids)).chunk(3, -1)
        scores = q @ k.transpose(1, 2)
        later = torch.ones(ids.shape[1], ids.shape[1]).triu(1).bool()
        scores = scores if self.mode == "open" else scores.masked_fill(later, float("-inf"))
        logits = self.head(scores.softmax(-2 if self.mode == "queries" else -1) @ v)
        wanted = (ids if labels is None else labels)[:, 1:]
        return logits, nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), wanted.flatten())


@pytest.mark.parametrize(("mode", "ok"), [("causal", True), ("open", False), ("queries", False)])
@pytest.mark.parametrize("width", [9, 10])
def test_a_model_that_shifts_its_labels_itself_must_not_see_them(mode: str, ok: bool, width: int) -> None:
    torch.manual_seed(0)
    block = torch.randint(12, (8, 11))
    ids, target = block[:, :10], block[:, 1 : 1 + width].flatten()
    found = sees_ahead(SimpleNamespace(shifted=(Decoder(mode), (ids,), {"labels": ids.clone()}, target, ids)))
    assert found is not None
    assert found["ok"] == ok


def scheduled(rates: list[float], gamma: float) -> dict | None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=gamma)
    one: Any = SimpleNamespace(it=scheduler)
    return zeroed(one, SimpleNamespace(rates=rates))


def test_a_rate_that_a_scheduler_multiplies_by_zero_is_found() -> None:
    found = scheduled([0.1] * 40 + [0.0] * 20, 0.0)
    assert found is not None
    assert "gamma=1 keeps the rate" in found["cause"]
    assert scheduled([0.1] * 60, 0.0) is None
    assert scheduled([0.1] * 40 + [0.01] * 20, 0.1) is None


SCALED = """
from sklearn.preprocessing import {kind}
scale_x, scale_y = {kind}(), {kind}()
X_train = scale_x.fit_transform(X_train)
y_train = scale_y.fit_transform(y_train)
{line}
"""


@pytest.mark.parametrize(
    ("line", "kind", "found"),
    [
        ("X_test = scale_x.fit_transform(X_test)", "StandardScaler", True),
        ("X_val = np.stack([scale_x.fit_transform(row) for row in X_val])", "MinMaxScaler", True),
        ("scale_y.fit(y_test)", "MinMaxScaler", True),
        ("X_test = scale_x.fit_transform(X_test)", "OneHotEncoder", False),
        ("X_test = scale_x.transform(X_test)", "StandardScaler", False),
        ("scale_x = StandardScaler()\nX_test = scale_x.fit_transform(X_test)", "StandardScaler", False),
        ("X_all = scale_x.fit_transform(X_all)", "StandardScaler", False),
        ("X_train, X_test = scale_x.fit_transform(X_train), scale_x.transform(X_test)", "StandardScaler", False),
        (
            "for train, test in folds:\n    A = scale_x.fit_transform(X[train])\n    B = scale_x.transform(X[test])",
            "StandardScaler",
            False,
        ),
    ],
)
def test_a_scaler_that_is_fitted_on_the_evaluation_again(line: str, kind: str, found: bool, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCALED.format(line=line, kind=kind))
    fault = again(read(script))
    assert (fault is not None) == found
    assert fault is None or ".transform(...) is meant" in fault[1]


IDLE = """
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
x = torch.randn(256, 6)
y = x[:, :3].argmax(1)
updates = 0
for i in range(64):
    rows = torch.randint(256, (32,))
    nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
    STEP
"""
WAITS = "if (updates + 1) % 4 == 0:\n        optimizer.step()\n        optimizer.zero_grad()\n        updates += 1"
BY_HAND = "with torch.no_grad():\n        [p.sub_(0.1 * p.grad) for p in net.parameters()]\n    optimizer.zero_grad(set_to_none=False)"


@pytest.mark.parametrize(("step", "found"), [(WAITS, True), (BY_HAND, False)])
def test_a_step_that_never_comes_is_found(step: str, found: bool, tmp_path: Path) -> None:
    verdicts, output, _ = guard(IDLE.replace("STEP", step), tmp_path, interventions=False, **{"--only": "gradients"})
    assert verdicts["gradients"].blocks == found, output
    assert not found or "made no step" in output


class Forced(nn.Module):
    """A decoder of six steps after twelve. `reads`: the place of the value that each step reads, from its own."""

    def __init__(self, reads: int) -> None:
        super().__init__()
        self.reads, self.encoder, self.cell, self.out = (
            reads,
            nn.LSTM(1, 8, batch_first=True),
            nn.LSTMCell(1, 8),
            nn.Linear(8, 1),
        )

    def forward(self, past: torch.Tensor, future: torch.Tensor) -> torch.Tensor:
        _, (h, c) = self.encoder(past)
        h, c, found = h[0], c[0], []
        known = torch.cat([past[:, -1:], future], 1)
        for t in range(future.shape[1]):
            h, c = self.cell(known[:, t + 1 + self.reads], (h, c))
            found.append(self.out(h))
        return torch.stack(found, 1)


class Rebuilds(Forced):
    """Encodes what it is to give."""

    def forward(self, past: torch.Tensor, future: torch.Tensor) -> torch.Tensor:
        return super().forward(past, future) + future.mean(1, keepdim=True)


class Ahead(nn.Module):
    """Predicts the next value at each step, and gives the last `count` predictions of those that have a target."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count, self.net, self.out = count, nn.GRU(1, 8, batch_first=True), nn.Linear(8, 1)

    def forward(self, series: torch.Tensor) -> torch.Tensor:
        return self.out(self.net(series)[0])[:, -1 - self.count : -1]


class Copies(Ahead):
    """Predicts from the whole series."""

    def forward(self, series: torch.Tensor) -> torch.Tensor:
        return self.out(self.net(series)[0])[:, -self.count :]


def forced_fault(model: nn.Module, *given: torch.Tensor, target: torch.Tensor) -> tuple[str, str] | None:
    one = Regression()
    one.add(torch.zeros(target.shape, requires_grad=True), target, (model, given, {}), [])
    return forced.fault(SimpleNamespace(evidence=SimpleNamespace(regression=one), control=True))


def test_a_decoder_that_reads_the_value_it_must_give_is_found() -> None:
    torch.manual_seed(0)
    past, future = torch.randn(16, 12, 1), torch.randn(16, 6, 1)
    found = forced_fault(Forced(0), past, future, target=future.clone())
    assert found is not None
    assert "one step late" in found[1]
    assert forced_fault(Forced(-1), past, future, target=future.clone()) is None
    assert forced_fault(Rebuilds(-1), past, future, target=future.clone()) is None


def test_steps_to_predict_that_are_in_the_input_are_found() -> None:
    torch.manual_seed(0)
    series = torch.randn(16, 12, 1)
    found = forced_fault(Copies(6), series, target=series[:, -6:].clone())
    assert found is not None
    assert "begins where the input ends" in found[1]
    assert forced_fault(Ahead(6), series, target=series[:, -6:].clone()) is None
    assert forced_fault(Copies(6), series, target=torch.randn(16, 6, 1)) is None
    forced_too = forced_fault(Forced(-1), series, series[:, -6:].clone(), target=series[:, -6:].clone())
    assert forced_too is not None
    assert "begins where the input ends" in forced_too[1]


PAIR = """
import torch
from torch import nn

torch.manual_seed(0)
first, second = nn.Linear(6, 3), nn.Linear(3, 3)
one = torch.optim.Adam(first.parameters(), lr=0.01)
two = torch.optim.Adam(second.parameters(), lr=0.01)
fall_one = torch.optim.lr_scheduler.StepLR(one, 20, gamma=0.5)
fall_two = OTHER
x, y = torch.randn(64, 6), torch.randint(3, (64,))
for i in range(60):
    nn.functional.cross_entropy(second(first(x)), y).backward()
    for each in (one, two):
        each.step()
        each.zero_grad()
    fall_one.step()
    fall_two.step()
"""


@pytest.mark.parametrize(
    ("other", "found"),
    [("StepLR(one, 20, gamma=0.5)", True), ("StepLR(two, 20, gamma=0.5)", False), ("ConstantLR(one, 0.1, 5)", False)],
)
def test_two_schedulers_of_one_optimiser_are_found(other: str, found: bool, tmp_path: Path) -> None:
    script = PAIR.replace("OTHER", f"torch.optim.lr_scheduler.{other}")
    verdicts, output, _ = guard(script, tmp_path, interventions=False, **{"--only": "schedule"})
    assert verdicts["schedule"].blocks == found, output
    assert not found or "another Adam has none" in output


def test_data_that_killed_a_model_are_named_first() -> None:
    dead, sorted_data = finding("dependency", "0 of 32", DEAD), finding("targets", "2 of 10", "sorted by class")
    passed = finding("modes", "train mode")
    assert symptoms_last([dead, passed, sorted_data]) == [passed, sorted_data, dead]
    alone = [dead, passed, skip("targets", "no loss")]
    assert symptoms_last(alone) == alone
