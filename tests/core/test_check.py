"""`core.check` on plain scripts: planted bugs are stopped by the gate that should, healthy scripts are let through."""

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_diabetes, load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset
from trainworthy.core.base.errors import GateFailed, UserError
from trainworthy.core.gates import order

import trainworthy
from tests.helpers.commands import environment, execute, holds
from tests.helpers.sampling import sample

X, Y = (torch.tensor(v) for v in load_digits(return_X_y=True))
X = X.float() / 16
ORDER = torch.randperm(len(X), generator=torch.Generator().manual_seed(1))
LEARN, HELD_OUT = ORDER[:1437], ORDER[1437:]
TRAIN, VAL = TensorDataset(X[LEARN], Y[LEARN]), TensorDataset(X[HELD_OUT], Y[HELD_OUT])


# ------------------------------------------------------------------------------------------------------ a healthy script
def net() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def loss(model: nn.Module, batch: list) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def accuracy(model: nn.Module, loader: DataLoader) -> float:
    model.eval()
    with torch.no_grad():
        return sum((model(x).argmax(1) == y).sum().item() for x, y in loader) / len(loader.dataset)


def train_epoch(model: nn.Module, optimizer: torch.optim.Optimizer, batches) -> None:
    model.train()
    for batch in batches:
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()


def script(model: Callable[[], nn.Module] = net, *, lr: float = 2e-3, **parts) -> Callable[[], trainworthy.Script]:
    """A factory of the healthy script, with some of its parts replaced."""

    def factory() -> trainworthy.Script:
        built = model()
        whole = {"train": TRAIN, "val": VAL, "loss": loss, "metric": accuracy, "train_loop": train_epoch, "classes": 10}
        optimizer = torch.optim.AdamW(built.parameters(), lr=lr)
        return trainworthy.Script(model=built, optimizer=optimizer, **{**whole, **parts})

    return factory


# -------------------------------------------------------------------------------------------------------------- the bugs
def softmax_first(model: nn.Module, batch: list) -> Tensor:
    return F.cross_entropy(model(batch[0]).softmax(1), batch[1])


def shifted(model: nn.Module, batch: list) -> Tensor:
    return F.cross_entropy(model(batch[0]), (batch[1] + 1) % 10)


def broadcast(model: nn.Module, batch: list) -> Tensor:
    return (model(batch[0]) - F.one_hot(batch[1], 10)[:, None]).square().mean()


def without_zero_grad(model, optimizer, batches) -> None:
    model.train()
    for batch in batches:
        loss(model, batch).backward()
        optimizer.step()


def without_train(model, optimizer, batches) -> None:
    for batch in batches:
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()


def step_first(model, optimizer, batches) -> None:
    model.train()
    for batch in batches:
        optimizer.step()
        optimizer.zero_grad()
        loss(model, batch).backward()


def without_eval(model: nn.Module, loader: DataLoader) -> float:
    with torch.no_grad():
        return sum((model(x).argmax(1) == y).sum().item() for x, y in loader) / len(loader.dataset)


def mean_of_means(model: nn.Module, loader: DataLoader) -> float:
    model.eval()
    with torch.no_grad():
        return sum((model(x).argmax(1) == y).float().mean().item() for x, y in loader) / len(loader)


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 10))


def head_frozen_by_flag() -> nn.Module:
    model = net()
    model[0].requires_grad_(False)
    return model


def head_alone() -> trainworthy.Script:
    whole = script()()
    whole.optimizer = torch.optim.AdamW(whole.model[2].parameters(), lr=2e-3)
    return whole


class Careless(nn.Sequential):
    """The net with a mistake in its forward."""

    def __init__(self, mistake: Callable[[Tensor], Tensor]):
        super().__init__(*net())
        self.mistake = mistake

    def forward(self, x: Tensor) -> Tensor:
        return self[2](self.mistake(self[1](self[0](x))))


class Changed(Dataset):
    """A data set whose samples are read through a function."""

    def __init__(self, data: Dataset, change: Callable):
        self.data, self.change = data, change

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int):
        return self.change(*self.data[index])


def own_draws() -> Callable:
    draws = np.random.default_rng(0)
    return lambda x, y: (x + float(draws.normal(0, 0.1)), y)


def seeded(x: Tensor, y: Tensor) -> tuple:
    torch.manual_seed(0)
    return x + 0.05 * torch.randn(64), y


def with_label(x: Tensor, y: Tensor) -> tuple:
    return torch.cat([y[None] / 9, x[1:]]), y


def checkpointed(keep_optimizer: bool) -> trainworthy.Script:
    whole = script()()

    def save(path: Path) -> None:
        torch.save([whole.model.state_dict(), whole.optimizer.state_dict() if keep_optimizer else None], path)

    def load(path: Path) -> None:
        model, optimizer = torch.load(path)
        whole.model.load_state_dict(model)
        if keep_optimizer:
            whole.optimizer.load_state_dict(optimizer)

    whole.save, whole.load = save, load
    return whole


# Rows of unequal length: a mean over tokens is no mean over rows.
LENGTHS = torch.randint(1, 9, (len(X),), generator=torch.Generator().manual_seed(2))
ROWS = [
    TensorDataset(X[i].view(-1, 8, 8), (X[i].view(-1, 8, 8).sum(2) > 2).long(), LENGTHS[i]) for i in (LEARN, HELD_OUT)
]


def token_loss(model: nn.Module, batch: list) -> Tensor:
    x, y, n = batch
    wanted = y.masked_fill(torch.arange(8) >= n[:, None], -100)
    return F.cross_entropy(model(x).flatten(0, 1), wanted.flatten(), ignore_index=-100)


def token_accuracy(model: nn.Module, loader: DataLoader) -> float:
    model.eval()
    right = total = 0.0
    with torch.no_grad():
        for x, y, n in loader:
            scored = torch.arange(8) < n[:, None]
            right, total = right + ((model(x).argmax(2) == y) & scored).sum().item(), total + n.sum().item()
    return right / total


def two_by_two(model, optimizer, batches) -> None:
    """Accumulates over two batches, each divided by its own tokens."""
    model.train()
    for i, batch in enumerate(batches):
        (token_loss(model, batch) / 2).backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()


def tokens(**parts) -> Callable:
    fields = {"0": trainworthy.Field("input"), "1": trainworthy.Field("target"), "2": trainworthy.Field("extent")}
    common = {
        "train": ROWS[0],
        "val": ROWS[1],
        "loss": token_loss,
        "metric": token_accuracy,
        "fields": fields,
        "floor": 0.5,
    }
    model = lambda: nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2))  # noqa: E731
    return script(model, lr=1e-2, **{**common, "classes": None, "train_loop": None, **parts})


PLANTS = {
    "softmax-before-cross-entropy": ("overfit", ("softmax before",), script(loss=softmax_first, train_loop=None)),
    "labels-shifted-in-the-loss": ("overfit", ("metric() reads other labels",), script(loss=shifted, train_loop=None)),
    "no-zero-grad": ("wiring", ("at step 2", "zero_grad"), script(train_loop=without_zero_grad)),
    "step-before-backward": ("wiring", ("at step",), script(train_loop=step_first)),
    "eval-mode-left-on": ("evaluation", ("eval mode", "first at step 3"), script(with_dropout, train_loop=without_train)),
    "dropout-at-evaluation": ("evaluation", ("differ", "model.eval()"), script(with_dropout, metric=without_eval)),
    "dropout-ignores-the-mode": ("evaluation", ("differ",), script(lambda: Careless(lambda h: F.dropout(h, 0.5)))),
    "mean-over-batch-means": ("evaluation", ("batch size",), script(metric=mean_of_means)),
    "validation-in-training": ("leakage", ("exact",), script(train=TensorDataset(X, Y))),
    "head-only-optimiser": ("wiring", ("in no optimiser", "0.weight"), head_alone),
    "frozen-by-flag": ("wiring", ("in no optimiser", "requires_grad", "frozen="), script(head_frozen_by_flag)),
    "detached": ("wiring", ("never got a gradient", "detach"), script(lambda: Careless(Tensor.detach))),
    "target-in-input": ("data", ("entry 0 of the input",), script(train=Changed(TRAIN, with_label), val=Changed(VAL, with_label))),
    "validation-not-normalised": ("data", ("another scale",), script(val=Changed(VAL, lambda x, y: (x * 16, y)))),
    "class-missing": ("data", ("no sample of class 10",), script(classes=11)),
    "own-batch-statistics": ("dependency", ("mixes samples",), script(lambda: Careless(lambda h: h - h.mean(0)))),
    "wrong-broadcast": ("dependency", ("broadcast",), script(loss=broadcast, train_loop=None)),
    "augmented-validation": ("schema", ("draws at random",), script(val=Changed(VAL, lambda x, y: (x + torch.rand(()), y)))),
    "own-generator": ("schema", ("differs between two reads", "repeats its draws"), script(train=Changed(TRAIN, own_draws()))),
    "seeded-in-getitem": ("loader", ("same in both epochs", "__getitem__"), script(train=Changed(TRAIN, seeded))),
    "checkpoint-without-optimiser": ("resume", ("tensors differ", "save() leaves"), lambda: checkpointed(False)),
    "mean-over-tokens-uncounted": ("accumulation", ("count=",), tokens()),
    "tokens-accumulated-as-means": ("wiring", ("own",), tokens(train_loop=two_by_two, accumulate=2, count=lambda b: b[2].sum())),
}  # fmt: skip
BEFORE = {
    "wrong-broadcast": ("wiring",),
    "mean-over-tokens-uncounted": ("dependency",),
    "augmented-validation": (),
}  # gates that meet it first


# Only `make verify` runs these: the gates that catch them are shown by a cheaper one here, or on a recipe in test_gates.
RELATIVES = ("labels-shifted-in-the-loss", "softmax-before-cross-entropy", "wrong-broadcast", "seeded-in-getitem", "frozen-by-flag",
             "eval-mode-left-on", "own-batch-statistics", "detached", "head-only-optimiser", "core-loop", "dropout",
             "dicts")  # fmt: skip


def sampled(names) -> list:
    """The names as cases; relatives are left to `make verify`."""
    return sample(names, *(n for n in names if n not in RELATIVES))


@pytest.mark.parametrize("name", sampled(PLANTS))
def test_caught(name: str):
    gate, words, factory = PLANTS[name]
    ids = [g.id for g in order.ORDER]
    result = trainworthy.check(factory, only=ids[: ids.index(gate) + 1], raises=False)
    assert not result.ok
    assert result.failed[0].id in (gate, *BEFORE.get(name, ())), result.table()
    verdict = next((v for v in result.failed if v.id == gate), None)
    assert verdict, result.table()
    said = result.table([verdict])
    assert not [w for w in words if w not in said], said


# ------------------------------------------------------------------------------------------------------ healthy scripts
class Jittered(Dataset):
    """Pictures moved and scaled by draws from all three generators that people use."""

    def __len__(self) -> int:
        return len(LEARN)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        x = X[LEARN[index]].view(1, 8, 8).roll(random.choice((-1, 0, 1)), 2)
        return x * np.float32(np.random.uniform(0.8, 1.0)) + 0.02 * torch.rand(()), int(Y[LEARN[index]])


def conv() -> trainworthy.Script:
    """Batch norm, dropout, a loader, warm-up, clipping, its own checkpoint."""
    model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
                          nn.Dropout(0.2), nn.Linear(256, 10))  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 20))

    def train_epoch(model: nn.Module, optimizer: torch.optim.Optimizer, batches) -> None:
        model.train()
        for batch in batches:
            optimizer.zero_grad()
            loss(model, batch).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()

    def load(path: Path) -> None:
        for part, state in zip((model, optimizer, scheduler), torch.load(path), strict=True):
            part.load_state_dict(state)

    return trainworthy.Script(
        model=model, optimizer=optimizer, train=DataLoader(Jittered(), batch_size=64, shuffle=True),
        val=TensorDataset(X[HELD_OUT].view(-1, 1, 8, 8), Y[HELD_OUT]), loss=loss, metric=accuracy, classes=10,
        train_loop=train_epoch, load=load,
        save=lambda path: torch.save([part.state_dict() for part in (model, optimizer, scheduler)], path),
    )  # fmt: skip


def regression() -> trainworthy.Script:
    """Mean squared error on 442 patients; lower is better."""
    x, y = (torch.tensor(v).float() for v in load_diabetes(return_X_y=True))
    x, y = x / x.std(0), (y - y.mean()) / y.std()
    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 1))

    def mse(model: nn.Module, loader: DataLoader) -> float:
        model.eval()
        with torch.no_grad():
            return sum(F.mse_loss(model(x)[:, 0], y, reduction="sum").item() for x, y in loader) / len(loader.dataset)

    return trainworthy.Script(
        model=model, optimizer=torch.optim.Adam(model.parameters(), lr=5e-3), train=TensorDataset(x[:350], y[:350]),
        val=TensorDataset(x[350:], y[350:]), loss=lambda model, b: F.mse_loss(model(b[0])[:, 0], b[1]), metric=mse,
        higher_is_better=False, floor=1.0,
    )  # fmt: skip


def by_name() -> trainworthy.Script:
    """Samples and batches are dicts; an entry that nobody reads comes along."""
    model = net()

    def data(indices: Tensor) -> list[dict]:
        return [{"pixels": X[i].numpy(), "label": int(Y[i]), "name": f"digit {i}"} for i in indices.tolist()]

    def score(model: nn.Module, loader: DataLoader) -> float:
        model.eval()
        with torch.no_grad():
            return sum((model(b["pixels"]).argmax(1) == b["label"]).sum().item() for b in loader) / len(loader.dataset)

    label = trainworthy.Field("target", classes="0123456789")
    return trainworthy.Script(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=2e-3), train=data(LEARN), val=data(HELD_OUT), metric=score,
        loss=lambda model, b: F.cross_entropy(model(b["pixels"]), b["label"]), initial_loss=2.303,
        fields={"pixels": trainworthy.Field("input", low=0, high=1), "label": label},
    )  # fmt: skip


HEALTHY = {
    "mlp": script(),
    "conv": conv,
    "regression": regression,
    "dicts": by_name,
    "core-loop": script(train_loop=None),
    "dropout": script(with_dropout),
    "frozen-and-said": script(head_frozen_by_flag, frozen=("0.",), lr=2e-2),
    "tokens-counted": tokens(count=lambda batch: batch[2].sum()),
    "checkpoint": lambda: checkpointed(True),
}


@pytest.mark.parametrize("name", sampled(HEALTHY))
def test_quiet(name: str):
    result = trainworthy.check(HEALTHY[name], raises=False)
    assert result.ok, result.table()
    proved = {v.id for v in result.verdicts if v.verdict == "pass"}
    assert {"schema", "data", "leakage", "wiring", "dependency", "overfit", "baseline", "evaluation"} <= proved, (
        result.table()
    )


@pytest.mark.verify
@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.parametrize("name", HEALTHY)
def test_quiet_at_every_seed(name: str, seed: int):
    result = trainworthy.check(HEALTHY[name], raises=False, seed=seed)
    assert result.ok, result.table()


# ------------------------------------------------------------------------------------------------------------- interface
def test_a_failure_raises_with_what_to_do_and_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    with pytest.raises(GateFailed) as caught:
        trainworthy.check(script(train_loop=without_zero_grad), only="wiring")
    holds(str(caught.value), "1 of 1 gates failed", "measured", "needed", "zero_grad() is missing")
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()
    assert random.getstate() == before[2]
    assert not [p for p in tmp_path.iterdir() if not p.name.startswith("torchinductor")]  # torch's own cache


def test_a_waived_gate_says_why(tmp_path: Path):
    broken = script(train_loop=without_zero_grad)
    result = trainworthy.check(
        broken, only=("schema", "wiring"), waive={"wiring": "large batches by accumulation"}, folder=tmp_path
    )
    assert result.ok
    assert [v.verdict for v in result.verdicts] == ["pass", "waived"]
    assert "large batches by accumulation" in result.table()
    kept = json.loads((tmp_path / "gates.json").read_text())["gates"]
    assert [g["verdict"] for g in kept] == ["pass", "waived"]
    with pytest.raises(UserError, match="needs a reason"):
        trainworthy.check(broken, waive={"wiring": " "})


ONCE = net()
MISUSE = {
    "returns the same model twice": script(lambda: ONCE),
    "must return a trainworthy.Script": net,
    "has no floor": script(higher_is_better=False),
    "which entry of a sample": script(target="label"),
    "is too small": script(val=TensorDataset(X[:1], Y[:1])),
    "map-style": script(train=iter(TRAIN)),
    "save and load": script(save=print),
    "cannot be counted": script(train=Changed(TRAIN, lambda x, y: ({"x": x}, y))),
    "collate drops 'target'": script(collate=lambda rows: {"x": torch.stack([r[0] for r in rows])}),
}


@pytest.mark.parametrize("said", MISUSE)
def test_misuse_gets_an_error(said: str):
    with pytest.raises(UserError, match=said):
        trainworthy.check(MISUSE[said])


def test_an_unknown_gate_gets_the_nearest_name():
    with pytest.raises(UserError, match="overfit"):
        trainworthy.check(script(), only="over-fit")


# -------------------------------------------------------------------------------------------- real files, real processes
PLAIN = """
import torch
import trainworthy
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

x, y = (torch.tensor(v) for v in load_digits(return_X_y=True))
x = x.float() / 16
train_set, val_set = TensorDataset(x[:1400], y[:1400]), TensorDataset(x[1400:], y[1400:])


def accuracy(model, loader):
    model.eval()
    with torch.no_grad():
        right = sum((model(x).argmax(1) == y).sum().item() for x, y in loader)
    return right / len(loader.dataset)


def train_epoch(model, optimizer, batches):
    model.train()
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def factory():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return trainworthy.Script(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=2e-3),
        train=train_set,
        val=val_set,
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        metric=accuracy,
        train_loop=train_epoch,
        classes=10,
    )


if __name__ == "__main__":
    trainworthy.check(factory, folder="evidence")
"""
TESTS = """
import plain


def test_gates(trainworthy_check):
    assert trainworthy_check(plain.factory, seed=1).ok
"""


def python(*argv: object, cwd: Path, code: int) -> subprocess.CompletedProcess:
    env = environment(PYTHONPATH=f"{Path(__file__).parents[2]}:{cwd}", PYTHONDONTWRITEBYTECODE="1")
    return execute(sys.executable, *argv, cwd=cwd, code=code, env=env)


def test_a_script_from_the_shell_and_its_repro(tmp_path: Path):
    (tmp_path / "plain.py").write_text(PLAIN)
    assert "pass   overfit" in python("plain.py", cwd=tmp_path, code=0).stdout
    (tmp_path / "plain.py").write_text(PLAIN.replace("        optimizer.zero_grad()\n", ""))
    done = python("plain.py", cwd=tmp_path, code=1)
    assert "FAIL   wiring" in done.stdout
    assert "zero_grad() is missing" in done.stderr
    again = python(tmp_path / "evidence" / "gates" / "wiring" / "repro.py", cwd=tmp_path, code=1)
    assert "1 of 1 gates failed" in again.stderr


def test_the_command_says_where_the_evidence_is(tmp_path: Path):
    (tmp_path / "plain.py").write_text(PLAIN)
    done = python("-m", "trainworthy", "check", "plain.py", "--only", "schema", "--out", "kept", cwd=tmp_path, code=0)
    assert "evidence in kept/gates.json" in done.stdout


PYTEST = ("-m", "pytest", "-q", "-p", "trainworthy.pytest_plugin", "-p", "no:cacheprovider", "--basetemp", "base")


def test_the_fixture_passes_and_fails_readably(tmp_path: Path):
    (tmp_path / "plain.py").write_text(PLAIN)
    (tmp_path / "test_plain.py").write_text(TESTS)
    python(*PYTEST, cwd=tmp_path, code=0)
    (tmp_path / "plain.py").write_text(PLAIN.replace("cross_entropy(model(x), y)", "cross_entropy(model(x).softmax(1), y)")
                                       .replace("model(batch[0])", "model(batch[0]).softmax(1)"))  # fmt: skip
    done = python(*PYTEST, cwd=tmp_path, code=1)
    holds(done.stdout, "FAIL   overfit (C4)", "measured", "needed", "softmax before cross-entropy", "evidence: ")
    assert "Traceback" not in done.stdout
    assert (tmp_path / "base" / "test_gates0" / "trainworthy" / "gates" / "overfit" / "repro.py").is_file()
