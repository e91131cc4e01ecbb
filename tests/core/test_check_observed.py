"""What a script's own loop shows on its own loaders (`guard/adapters/observed.py`), and the causes of two gates for scripts."""

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, TensorDataset
from trainworthy.guard.adapters import loop

import trainworthy
from tests.core.test_check import TRAIN, VAL, X, Y, accuracy, script
from tests.guard.score import cases


def failure(factory: Callable, gate: str) -> str:
    result = trainworthy.check(factory, only=gate, raises=False)
    return "" if result.ok else result.table()


def words(seed: int, n: int = 300) -> list[tuple[Tensor, int]]:
    """Texts whose most frequent kind of word is their class."""
    draw = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(n):
        label, length = int(torch.randint(3, (), generator=draw)), int(torch.randint(4, 20, (), generator=draw))
        rows.append((1 + 10 * label + torch.randint(0, 14, (length,), generator=draw) % 30, label))
    return rows


class Pooled(nn.Module):
    def __init__(self, masked: bool):
        super().__init__()
        self.masked, self.embed, self.head = masked, nn.Embedding(64, 16, padding_idx=0), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        mask = (x > 0).unsqueeze(-1) if self.masked else torch.ones_like(x).unsqueeze(-1)
        return self.head((self.embed(x) * mask).sum(1) / mask.sum(1))


def padded(rows: list) -> tuple[Tensor, Tensor]:
    return pad_sequence([x for x, _ in rows], batch_first=True), torch.tensor([y for _, y in rows])


def sorted_alone(rows: list) -> tuple[Tensor, Tensor]:
    texts = sorted((x for x, _ in rows), key=len, reverse=True)
    return pad_sequence(texts, batch_first=True), torch.tensor([y for _, y in rows])


def texts(*, masked: bool = True, collate: Callable = padded, **parts: Any) -> Callable:
    return script(lambda: Pooled(masked), train=words(0), val=words(1, 100), collate=collate, classes=3, **parts)


def test_a_collate_that_sorts_inputs_alone():
    assert "entries are those of different samples" in failure(texts(collate=sorted_alone), "samples")
    assert not failure(texts(), "samples")


def test_padding_that_is_pooled_is_named():
    assert "padding is not masked" in failure(texts(masked=False), "dependency")
    assert not failure(texts(), "dependency")


def test_a_waiver_of_leakage_holds_for_the_samples_too():
    copied = script(train=TensorDataset(X, Y))
    result = trainworthy.check(copied, only=("leakage", "samples"), waive={"leakage": "on purpose"}, raises=False)
    assert [v.verdict for v in result.verdicts] == ["waived", "skip"], result.table()
    assert "validation samples are training samples" in failure(copied, "samples")


def test_a_loop_that_cannot_use_its_own_loader_is_skipped():
    def own(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> None:
        if isinstance(batches, DataLoader):
            raise RuntimeError("batches of core alone")
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    result = trainworthy.check(script(train_loop=own), only=("targets", "wiring"), raises=False)
    assert [v.verdict for v in result.verdicts] == ["skip", "pass"]
    assert "batches of core alone" in result.table()


def test_loss_and_metric_that_want_opposite_answers():
    def parity(data: TensorDataset) -> TensorDataset:
        return TensorDataset(data.tensors[0], data.tensors[1] % 2)

    def opposite(model: nn.Module, loader: DataLoader) -> float:
        return 1 - accuracy(model, loader)

    parts = {"train": parity(TRAIN), "val": parity(VAL), "classes": 2}
    assert "want opposite answers: opposite is 0" in failure(script(metric=opposite, **parts), "overfit")
    assert not failure(script(**parts), "overfit")


@pytest.mark.parametrize("id", ["genres--cross_entropy", "genres", "bike_windows", "bike_windows--first_state"])
def test_the_twelfth_set(id: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
    """What it found in scripts of practitioners, and a false alarm of `leakage` that it had."""
    text = next(text for _, name, text in cases("twelfth", "open", "all") if name == id)
    space: dict[str, Any] = {"__name__": "twelfth"}
    exec(compile(text, id, "exec"), space)
    wrong = {"genres--cross_entropy": "do not exclude each other", "bike_windows--first_state": "1 of 48 places"}.get(
        id
    )
    found = failure(space["make_script"], "schema leakage samples targets dependency")
    assert (wrong in found) if wrong else not found


def test_a_loop_takes_the_position_of_its_target_as_a_script_does():
    batch: Any = (torch.zeros(4, 2), torch.zeros(4))
    seen: Any = SimpleNamespace(passes=[SimpleNamespace(training=True, recent=[batch])])
    assert [loop._leaf(name, seen) for name in ("1", 1)] == [1, 1]


def test_the_source_of_the_factory_s_file_is_read(tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
    text = next(text for _, id, text in cases("tenth", "open", "bugs") if id == "slots_intent--plus_after_equals")
    (tmp_path / "slots_replaced.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    factory = importlib.import_module("slots_replaced").make_script
    assert "`+=` is meant" in failure(factory, "names")


def test_a_validation_that_is_not_normalised_as_training_is():
    mean, std = TRAIN.tensors[0].mean(), TRAIN.tensors[0].std()
    train = TensorDataset((TRAIN.tensors[0] - mean) / std, TRAIN.tensors[1])
    val = TensorDataset((VAL.tensors[0] - mean) / std, VAL.tensors[1])
    raw = TensorDataset(VAL.tensors[0] * 16, VAL.tensors[1])
    assert "normalised differently" in failure(script(train=train, val=raw), "evaluated")
    assert not failure(script(train=train, val=val), "evaluated")


class Places(nn.Module):
    """A class for each pixel of a digit."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.view(-1, 1, 8, 8))


def inked(data: TensorDataset) -> TensorDataset:
    return TensorDataset(data.tensors[0], (data.tensors[0] > 0.5).long().view(-1, 8, 8))


@pytest.mark.parametrize("shifted", [False, True])
def test_class_weights_of_pixels_make_a_mean_over_weights(shifted: bool):
    def weighted(model: nn.Module, batch: Any) -> Tensor:
        targets = batch[1].roll(1, 0) if shifted else batch[1]
        return F.cross_entropy(model(batch[0]), targets, weight=torch.tensor([0.3, 3.0]))

    parts = {"train": inked(TRAIN), "val": inked(VAL), "classes": 2, "loss": weighted, "train_loop": None}
    result = trainworthy.check(script(Places, **parts), only="dependency", raises=False)
    assert result.ok != shifted, result.table()
    assert ("a mean with weights" in result.table()) != shifted


def test_a_loss_that_leaves_samples_out_is_no_mean_over_weights():
    """The gradient of a sample that is left out has no direction."""

    def first_half(model: nn.Module, batch: Any) -> Tensor:
        n = max(1, len(batch[0]) // 2)
        return F.cross_entropy(model(batch[0])[:n], batch[1][:n])

    result = trainworthy.check(script(loss=first_half, train_loop=None), only="dependency", raises=False)
    assert not result.ok
