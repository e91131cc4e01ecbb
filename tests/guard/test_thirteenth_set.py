"""The thirteenth set, healthy scripts alone, through `guard` and `trainworthy.check`; and what they led to: classes that are held out on
purpose, a task after a pretraining, decoders that shift their targets, batches with time first, metrics that are means over classes."""

import copy
import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from trainworthy.guard.adapters import entries
from trainworthy.guard.checks.causality import follows_only_the_past
from trainworthy.guard.checks.samples import of_other_models

import trainworthy
from tests.core.test_check import TRAIN, VAL, loss, net, train_epoch
from tests.guard.guarding import SCRIPTS, guard
from tests.guard.test_guard import failed
from tests.helpers.sampling import sample

FOLDER = SCRIPTS / "thirteenth"
HEALTHY = sorted(p.stem for p in FOLDER.glob("*.py"))
CHECKED = [name for name in HEALTHY if "def make_script" in (FOLDER / f"{name}.py").read_text()]


@pytest.mark.parametrize("name", sample(HEALTHY, "batch_hard", "river_levels"))
def test_a_healthy_script_is_quiet(name: str, tmp_path: Path) -> None:
    verdicts, output, _ = guard((FOLDER / f"{name}.py").read_text(), tmp_path)
    assert not failed(verdicts), output


@pytest.mark.verify
@pytest.mark.parametrize("name", CHECKED)
def test_check_of_its_parts_is_quiet(name: str) -> None:
    result = trainworthy.check(runpy.run_path(str(FOLDER / f"{name}.py"))["make_script"], raises=False)
    assert result.ok, result.table()


@pytest.mark.parametrize(("slower", "ok"), [(1, True), (3000, False)])
def test_right_answers_whose_loss_needs_a_higher_rate(slower: int, ok: bool) -> None:
    make = runpy.run_path(str(FOLDER / "ordinal_quality.py"))["make_script"]

    def factory() -> trainworthy.Script:
        script = make()
        for group in script.optimizer.param_groups:
            group["lr"] /= slower
        return script

    result = trainworthy.check(factory, only="overfit", raises=False)
    assert result.ok == ok, result.table()


def macro_recall(model: nn.Module, loader: DataLoader) -> float:
    """Mean over ten classes; one without a sample counts 0."""
    model.eval()
    right, count = torch.zeros(10), torch.zeros(10)
    with torch.no_grad():
        for x, y in loader:
            count += torch.bincount(y, minlength=10)
            right += torch.bincount(y[model(x).argmax(1) == y], minlength=10)
    return (right / count.clamp(min=1)).mean().item()


def renumbered(model: nn.Module, loader: DataLoader) -> float:
    return macro_recall(model, [(x, torch.where(y < 2, 1 - y, y)) for x, y in loader])  # type: ignore[arg-type]


@pytest.mark.parametrize(("metric", "ok"), [(macro_recall, True), (renumbered, False)])
def test_a_mean_over_classes_that_eight_samples_do_not_have(metric, ok: bool) -> None:
    def factory() -> trainworthy.Script:
        model = net()
        return trainworthy.Script(
            model=model, optimizer=torch.optim.Adam(model.parameters(), lr=3e-3), train=TRAIN, val=VAL, loss=loss, metric=metric,
            train_loop=train_epoch, classes=10,
        )  # fmt: skip

    result = trainworthy.check(factory, only="overfit", raises=False)
    assert result.ok == ok, result.table()
    assert not ok or "8 of 10" in result.table()


BY_CLASS = """
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x, y = (torch.tensor(v) for v in load_digits(return_X_y=True))
order = y.argsort(stable=True)
x, y = x[order].float() / 16, y[order]
train, test = TensorDataset(x[:1250], y[:1250]), TensorDataset(x[1250:], y[1250:])
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, OUTPUTS))
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
for epoch in range(4):
    model.train()
    for a, b in DataLoader(train, 32, shuffle=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(a), b).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        right = sum((model(a).argmax(1) == b).sum().item() for a, b in DataLoader(test, 64))
"""
"""The rows are in the order of their classes when they are split."""


@pytest.mark.parametrize(("outputs", "stopped"), [("10", True), ("7", False)])
def test_rows_in_the_order_of_their_classes(outputs: str, stopped: bool, tmp_path: Path) -> None:
    verdicts, output, _ = guard(BY_CLASS.replace("OUTPUTS", outputs), tmp_path, **{"--only": "samples"})
    assert verdicts["samples"].blocks == stopped, output
    assert not stopped or "order of their classes" in output


class Decoder(nn.Module):
    """Gets the whole series; its state at a place has seen the values up to there, or with `shifts` up to the one before."""

    def __init__(self, shifts: bool):
        super().__init__()
        self.rnn, self.out, self.shifts = nn.GRU(3, 8, batch_first=True), nn.Linear(8, 3), shifts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = F.pad(x, (0, 0, 1, 0))[:, :-1] if self.shifts else x
        return self.out(self.rnn(given)[0])


def test_a_decoder_that_shifts_its_targets_does_not_copy_them() -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 12, 3)
    assert follows_only_the_past(Decoder(shifts=False), (x,), {}, x)
    assert not follows_only_the_past(Decoder(shifts=True), (x,), {}, x)


def test_an_evaluation_of_another_model_belongs_to_its_own_training() -> None:
    pretraining, tuning, held_out, probe = (SimpleNamespace() for _ in range(4))

    def row(loader, model: int, training: bool):
        return SimpleNamespace(loader=loader, training=training, calls=1, modes=[(model, training, 0, 0)])

    passes = [row(pretraining, 1, True), row(probe, 1, False), row(tuning, 2, True), row(held_out, 2, False)]
    assert of_other_models(SimpleNamespace(passes=passes), pretraining) == {id(held_out)}
    averaged = [row(pretraining, 1, True), row(held_out, 3, False)]  # an average of the model that trains
    assert of_other_models(SimpleNamespace(passes=averaged), pretraining) == set()


class Clips(Dataset):
    def __len__(self) -> int:
        return 9

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.full((3 + i, 4), float(i)), i % 2


def time_first(samples: list) -> tuple[torch.Tensor, torch.Tensor]:
    clips, labels = zip(*samples, strict=True)
    return nn.utils.rnn.pad_sequence(clips), torch.tensor(labels)


def test_time_first_batches_have_their_samples_first_within_the_gates() -> None:
    script = trainworthy.Script(
        model=nn.Linear(1, 1), optimizer=None, train=Clips(), val=Clips(), loss=None, metric=None, collate=time_first,  # type: ignore[arg-type]
    )  # fmt: skip
    data = entries.samples(script, Clips(), fixed=True)
    data.fields = entries.fields(script, data)
    batch = data.collate([data.get(i, None) for i in (0, 4, 6, 7)])
    assert [tuple(v.shape) for v in batch.values()] == [(4, 10, 4), (4,)]
    mine, own = data.batch(copy.copy(batch)), time_first([Clips()[i] for i in (0, 4, 6, 7)])
    assert all(np.array_equal(a, b) for a, b in zip(mine, own, strict=True))
