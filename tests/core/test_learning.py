"""Gates on learning against planted bugs and healthy variants that look like them: what a net reaches on shuffled labels, what a
batch larger than eight does, what is chance, and which cause fits."""

import contextlib
import io
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from trainworthy.core.base.verdict import Verdict
from trainworthy.core.gates.checks import learning, tiny_data
from trainworthy.core.recipe.stage import Expect, Metric

import trainworthy
from tests.core.test_check import (
    HELD_OUT,
    LEARN,
    Careless,
    X,
    Y,
    loss,
    script,
    softmax_first,
    step_first,
    train_epoch,
    with_dropout,
    without_zero_grad,
)
from tests.helpers.sampling import sample

SIDE = (Y > 4).long()  # ten groups that look alike, two classes


def two() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))


def verdict(factory: Callable, gate: str, seed: int = 0) -> Verdict:
    """What one gate says of a script."""
    with contextlib.redirect_stdout(io.StringIO()):
        return trainworthy.check(factory, only=gate, raises=False, seed=seed).verdicts[0]


def of(labels: Tensor, *, permuted: int | None = None, model: Callable | None = None, **parts) -> Callable:
    """A script whose training labels are permuted apart from their rows."""
    y = labels[LEARN]
    if permuted is not None:
        y = y[torch.randperm(len(y), generator=torch.Generator().manual_seed(permuted))]
    parts = {"train": TensorDataset(X[LEARN], y), "val": TensorDataset(X[HELD_OUT], labels[HELD_OUT]), **parts}
    return script(model, **parts) if model else script(**parts)


def redrawn(model: nn.Module, batch: list) -> Tensor:
    out = model(batch[0])
    return (out - F.one_hot(batch[1], 10) - 2 * torch.randn_like(out)).square().mean()


def test_a_loss_that_draws_its_noise_again_is_the_first_cause_of_overfit():
    """It was "wrong formula or target: softmax before cross-entropy"."""
    found = verdict(script(loss=redrawn), "overfit")
    assert found.verdict == "fail", found.measured
    assert found.cause.startswith("the loss draws random numbers at each call"), found.cause


# ------------------------------------------------------------------------------------------------------ steps of overfit
NEAR_THE_FLOOR = [(5 * i, 6.33 * 0.97 ** (5 * i), None) for i in range(20)]  # 0.35 at the last of them


@pytest.mark.parametrize(
    ("metric", "curve", "given"),
    [
        pytest.param(0.17, NEAR_THE_FLOOR, [1, 2], id="the metric follows the loss"),
        pytest.param(0.09, NEAR_THE_FLOOR, [1], id="the metric is at its goal"),
        pytest.param(0.17, [(5 * i, 0.35, None) for i in range(20)], [1], id="the loss does not fall"),
        pytest.param(0.9, [(5 * i, 6.33 - 0.1 * i, None) for i in range(20)], [1], id="the loss is high"),
    ],
)
def test_expensive_samples_get_twice_the_steps_where_only_the_metric_is_short_of_its_goal(
    monkeypatch: pytest.MonkeyPatch, metric: float, curve: list, given: list
):
    """llm/pretrain with a head at a quarter of the rate was stopped: its bits per byte are the loss in another unit, at a
    lower limit than the loss itself."""
    found = {
        "curve": curve,
        "loss": curve[-1][1],
        "needed_loss": 0.19,
        "enough": 0.398,
        "metric": metric,
        "goal": 0.103,
    }
    bits = SimpleNamespace(
        gate_evaluator=SimpleNamespace(metric=Metric("bits_per_byte", "", 8.0, 0.0, higher_is_better=False))
    )
    tried: list[int] = []
    monkeypatch.setattr(learning, "_train_on_eight", lambda _, times=1: (tried.append(times), bits, found))
    learning.overfitted(SimpleNamespace(expect=Expect(gate_batch_size=8), once=lambda _, make: make()))
    assert tried == given


# --------------------------------------------------------------------------------------------------------- shuffled labels
PERMUTATIONS = [
    pytest.param(p, s, marks=[pytest.mark.verify] if p % 4 or s else []) for p in range(100, 108) for s in range(3)
]


@pytest.mark.parametrize(("permutation", "seed"), PERMUTATIONS)
def test_labels_permuted_apart_from_their_rows_are_stopped(permutation: int, seed: int):
    """7 of 24 draws passed: what look-alikes are called is right or wrong for all of them at once."""
    found = verdict(of(Y, permuted=permutation), "tiny-data", seed)
    assert found.verdict == "fail", found.measured
    assert "labels shuffled before the split" in found.remedy.splitlines()[0]


@pytest.mark.parametrize("seed", range(2))
def test_two_classes_are_told_from_shuffled_ones_by_a_second_training(seed: int):
    """A net on shuffled labels of two classes is right on 0.8 of the held-out samples in one draw of twenty."""
    right = verdict(of(SIDE, model=two, classes=None), "tiny-data", seed)  # chance is not told: it is measured
    assert right.verdict == "pass", right.measured
    wrong = verdict(of(SIDE, model=two, classes=None, permuted=100 + seed), "tiny-data", seed)
    assert wrong.verdict == "fail", wrong.measured


def test_five_classes_are_judged_by_a_second_training():
    """One class in five keeps its place when classes are permuted, so a right model of accuracy 0.6 scores 0.15 +- 0.19 with permuted classes:
    three standard deviations left it no room."""
    five = lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))  # noqa: E731
    right = verdict(of(Y % 5, model=five, classes=None), "tiny-data")
    assert right.verdict == "pass", right.measured
    assert "classes permuted" not in right.measured
    assert "on permuted inputs" in right.measured
    wrong = verdict(of(Y % 5, model=five, classes=None, permuted=100), "tiny-data")
    assert wrong.verdict == "fail", wrong.measured


@pytest.mark.parametrize("first", [0.25, 0.30])
@pytest.mark.parametrize(("gap", "kind"), [(0.34, "pass"), (0.2, "fail")])
def test_other_samples_may_be_surer_than_the_first_ones(
    monkeypatch: pytest.MonkeyPatch, first: float, gap: float, kind: str
):
    """A net that memorises fits permuted labels as fast, so its second training says nothing. The numbers are those of a BERT on 256 sentences
    of two classes: 4 to 5 standard deviations on the first held-out samples, 8 on others."""

    def trained(*_: Any, seed: int | None = None, **__: Any) -> dict:
        carried = tiny_data.Skill(0.16 + first, 0.16, 0.06, gap=first, needed=0.18)
        if seed is not None:
            carried = tiny_data.Skill(0.06 + gap, 0.06, 0.04, gap=gap, needed=0.12)
        learnt = tiny_data.Skill(0.99, 0.17, 0.03, gap=0.82, needed=0.08)
        same = tiny_data.Retrained(own=0.10, shuffled=0.11, first=0.7, gap=0.0)
        return {"train": learnt, "held_out": carried, "test": None, "classes": 2, "behind": "", "exchanged": [], "steps": 120,
                "samples": 256, "in_time": True, "losses": [], "retrain": lambda: same}  # fmt: skip

    monkeypatch.setattr(tiny_data, "_train_on_few", trained)
    found = verdict(of(SIDE, model=two, classes=None), "tiny-data")
    assert found.verdict == kind, found.measured


def test_a_run_that_ended_without_a_gap_fails_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch):
    """It was skipped, and a skip is exit 0."""
    monkeypatch.setattr(tiny_data, "SECONDS", -1.0)
    monkeypatch.setattr(tiny_data, "_afford", lambda *_: None)
    cut = verdict(of(Y, permuted=100), "tiny-data")
    assert (cut.verdict, cut.reason[:22]) == ("skip", "no result after 1 step"), "nothing ended: nothing is known"
    monkeypatch.setattr(tiny_data, "SECONDS", 1e9)
    clock = iter(range(10**9))
    monkeypatch.setattr(tiny_data.time, "process_time", lambda: next(clock))
    monkeypatch.setattr(
        tiny_data, "SECONDS", tiny_data.TINY_STEPS + 2.0
    )  # ticks: the first run ends in time, the second does not
    ended = verdict(of(Y, permuted=100), "tiny-data")
    assert ended.verdict == "fail", ended.reason
    assert f"after {tiny_data.TINY_STEPS} steps" in ended.measured


def test_few_samples_from_scratch_are_not_called_shuffled_labels():
    """Their labels are right, and are learnt faster than permuted ones; what is missing is more of them."""
    noisy = X + 0.7 * torch.randn(X.shape, generator=torch.Generator().manual_seed(3))
    data = {
        "train": TensorDataset(noisy[LEARN[:40]], Y[LEARN[:40]]),
        "val": TensorDataset(noisy[HELD_OUT], Y[HELD_OUT]),
    }
    found = verdict(script(**data), "tiny-data")
    if found.verdict == "fail":
        assert "too few samples" in found.remedy
        assert "shuffled" not in found.remedy.splitlines()[0], found.remedy


# ---------------------------------------------------------------------------------------------------------- large batches
def mixing(above: int, entry: int = 1) -> Callable:
    """A collate that gives each label to the next row where there are more than `above`."""

    def collate(rows: list) -> list[Tensor]:
        batch = [torch.stack(column) for column in zip(*rows, strict=True)]
        if len(rows) > above:
            batch[entry] = batch[entry].roll(1, 0)
        return batch

    return collate


class Tokens(nn.Module):
    """Reads whole numbers: there is no gradient of the input."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(17, 8), nn.Linear(64 * 8, 10)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids).flatten(1))


@pytest.mark.parametrize(
    ("kind", "entry"),
    sample([("pictures", 0), ("pictures", 1), ("tokens", 0), ("tokens", 1)], ("pictures", 0), ("tokens", 1)),
)
def test_a_collate_that_mixes_rows_in_large_batches_alone_is_stopped(kind: str, entry: int):
    ids = (X * 16).long()
    parts = {
        "model": Tokens,
        "train": TensorDataset(ids[LEARN], Y[LEARN]),
        "val": TensorDataset(ids[HELD_OUT], Y[HELD_OUT]),
    }
    parts = parts if kind == "tokens" else {}
    assert verdict(script(**parts), "dependency").verdict == "pass"
    found = verdict(script(**parts, collate=mixing(8, entry), train_loop=None), "dependency")
    assert found.verdict == "fail", found.measured
    assert "collate() mixes up rows: in a batch of 32" in found.remedy.splitlines()[0], found.remedy


# --------------------------------------------------------------------------------------------- loops and losses of others
def all_at_once(model: nn.Module, optimizer: torch.optim.Optimizer, batches) -> None:
    train_epoch(model, optimizer, list(batches))


def one_ahead(model: nn.Module, optimizer: torch.optim.Optimizer, batches) -> None:
    """nanoGPT: the next batch is fetched while this one is computed."""
    model.train()
    source = iter(batches)
    batch = next(source, None)
    while batch is not None:
        found = loss(model, batch)
        batch = next(source, None)
        optimizer.zero_grad()
        found.backward()
        optimizer.step()


def mean_afterwards(model: nn.Module, optimizer: torch.optim.Optimizer, batches) -> None:
    model.train()
    total = 0.0
    for batch in batches:
        optimizer.zero_grad()
        found = loss(model, batch)
        found.backward()
        optimizer.step()
        total += found.item()
    print(total / len(batches), file=io.StringIO())


WEIGHTS = torch.linspace(0.5, 2.0, 10)


def criterion(**how) -> dict:
    """A loss with settings, and the loop that calls it."""

    def own(model: nn.Module, batch: list) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], **how)

    def train(model, optimizer, batches) -> None:
        model.train()
        for batch in batches:
            optimizer.zero_grad()
            own(model, batch).backward()
            optimizer.step()

    return {"loss": own, "train_loop": train}


LOOPS = {
    "list": {"train_loop": all_at_once},
    "list-with-dropout": {"train_loop": all_at_once, "model": with_dropout},
    "prefetch": {"train_loop": one_ahead},
    "prefetch-with-dropout": {"train_loop": one_ahead, "model": with_dropout},
    "mean-after-the-loop": {"train_loop": mean_afterwards},
    "label-smoothing": criterion(label_smoothing=0.1),
    "class-weights": criterion(weight=WEIGHTS),
}


@pytest.mark.parametrize("name", sample(LOOPS, "prefetch-with-dropout", "mean-after-the-loop", "class-weights"))
def test_loops_and_losses_that_people_write_are_quiet(name: str):
    gates = ("wiring", "dependency", "overfit", "evaluation", "tiny-data")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        found = trainworthy.check(script(**LOOPS[name]), only=gates, raises=False)
    assert [v.verdict for v in found.verdicts] == ["pass"] * len(gates), found.table()
    said = {"label-smoothing": "label smoothing 0.1 over 10 classes", "class-weights": "class weights 1, 1.33, 1.67"}
    assert said.get(name, "") in printed.getvalue()


def test_a_softmax_before_the_cross_entropy_is_not_taken_for_a_floor():
    found = verdict(script(loss=softmax_first, train_loop=None), "overfit")
    assert found.verdict == "fail"


# ------------------------------------------------------------------------------------------------- the cause comes first
def of_a_copy() -> trainworthy.Script:
    whole = script()()
    whole.optimizer = torch.optim.AdamW(two().parameters(), lr=2e-3)
    return whole


def first_half(model, optimizer, batches) -> None:
    """Of two micro-batches one is lost."""
    model.train()
    for i, batch in enumerate(batches):
        if i % 2 == 0:
            optimizer.zero_grad()
            (loss(model, batch) / 2).backward()
        else:
            optimizer.step()


def twice_as_long(model, optimizer, batches) -> None:
    model.train()
    for i, batch in enumerate(batches):
        if i % 2 == 0:
            optimizer.zero_grad()
        loss(model, batch).backward()
        if i % 2:
            optimizer.step()


def neighbours(model, optimizer, batches) -> None:
    model.train()
    for batch in batches:
        optimizer.zero_grad()
        loss(model, [batch[0], batch[1].roll(1, 0)]).backward()
        optimizer.step()


def twisted(model, optimizer, batches) -> None:
    """What no experiment knows: each gradient is replaced by its sign."""
    model.train()
    for batch in batches:
        optimizer.zero_grad()
        loss(model, batch).backward()
        for p in model.parameters():
            p.grad.sign_()
        optimizer.step()


CAUSES = {
    "no-zero-grad": (script(train_loop=without_zero_grad), "zero_grad() is missing"),
    "step-first": (script(train_loop=step_first), "step() comes before backward()"),
    "half-of-the-batch": (script(train_loop=first_half, accumulate=2), "1 of 2 micro-batches are lost"),
    "sum-of-means": (script(train_loop=twice_as_long, accumulate=2), "divide its loss by 2"),
    "targets-shifted": (script(train_loop=neighbours), "targets and inputs are shifted"),
    "signs": (script(train_loop=twisted), "no known mistake explains it"),
}


@pytest.mark.parametrize("name", CAUSES)
def test_the_cause_that_was_planted_is_named_first(name: str):
    factory, cause = CAUSES[name]
    found = verdict(factory, "wiring")
    assert found.verdict == "fail"
    assert cause in found.remedy.splitlines()[0], found.remedy


def test_a_rate_that_is_far_too_high_is_the_first_cause_of_tiny_data():
    found = verdict(script(lr=3.0), "tiny-data")  # at 1.0 some processors learn a little
    assert found.verdict == "fail"
    assert found.remedy.startswith("the rate is far too high: at 0.0333 times the rate"), found.remedy


def test_an_optimiser_over_another_model_is_named_once():
    with contextlib.redirect_stdout(io.StringIO()):
        result = trainworthy.check(of_a_copy, raises=False)
    failed = {v.id: v for v in result.failed}
    assert list(failed) == ["wiring"], result.table()
    assert "the optimiser holds parameters of another model" in failed["wiring"].measured
    assert "RuntimeError" not in result.table()


def test_accumulation_where_nothing_steps_does_not_crash():
    """`'int' object has no attribute 'sqrt'`."""
    found = verdict(script(train_loop=None, model=lambda: Careless(Tensor.detach)), "accumulation")
    assert "raised" not in found.measured
