"""`check` of scripts with habits that people have: healthy loops that gates used to stop, and what was declared and is not so."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import trainworthy
from tests.core.test_check import TRAIN, VAL, accuracy, loss, net, train_epoch
from tests.helpers.sampling import sample

Loop = Callable[[nn.Module, Any, Any], None]


def listed(model: nn.Module, optimizer: Any, batches: Any) -> None:
    train_epoch(model, optimizer, list(batches))


def mixup(model: nn.Module, optimizer: Any, batches: Any) -> None:
    model.train()
    for x, y in batches:
        share, other = np.random.beta(0.2, 0.2), torch.randperm(len(x))
        scores = model(share * x + (1 - share) * x[other])
        optimizer.zero_grad()
        (share * F.cross_entropy(scores, y) + (1 - share) * F.cross_entropy(scores, y[other])).backward()
        optimizer.step()


def sharpness_aware(model: nn.Module, optimizer: Any, batches: Any) -> None:
    model.train()
    for batch in batches:
        optimizer.zero_grad()
        loss(model, batch).backward()
        size = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        moves = [0.05 * p.grad / size for p in model.parameters()]
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.add_(move)
        optimizer.zero_grad()
        loss(model, batch).backward()
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.sub_(move)
        optimizer.step()


def without_gradients(model: nn.Module, optimizer: Any, batches: Any) -> None:
    model.train()
    for batch in batches:
        loss(model, batch).backward()
        optimizer.zero_grad()
        optimizer.step()


def with_batch_norm() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))


class Averaged(nn.Module):
    """A net that answers by the average of its weights in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.ema = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.ema.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) if self.training else self.ema(x)


def averaged(model: nn.Module, optimizer: Any, batches: Any) -> None:
    for batch in batches:
        train_epoch(model, optimizer, [batch])
        model.ema.update_parameters(model.net)


def script(
    make: Callable[[], nn.Module] = net,
    loop: Loop = train_epoch,
    *,
    rate: float = 0.1,
    trains: Callable = lambda m: m,
    **more: Any,
) -> Callable[[], trainworthy.Script]:
    def factory() -> trainworthy.Script:
        model = make()
        optimizer = torch.optim.SGD(trains(model).parameters(), lr=rate)
        return trainworthy.Script(model=model, optimizer=optimizer, train=DataLoader(TRAIN, 32, shuffle=True), val=VAL, loss=loss, metric=accuracy,
                                  train_loop=loop, classes=10, **more)  # fmt: skip

    return factory


def frozen_base() -> nn.Module:
    model = with_batch_norm()
    model[:2].requires_grad_(False)
    return model


HEALTHY = {
    "batches-in-a-list": (script(loop=listed), "loader"),
    "mixup": (script(loop=mixup), "wiring"),
    "sharpness-aware": (script(loop=sharpness_aware), "wiring"),
    "average-inside": (script(Averaged, averaged, trains=lambda m: m.net), "wiring"),
    "statistics-of-a-frozen-base": (script(frozen_base, trains=lambda m: m[3], frozen=("0.", "1.")), "wiring"),
    "bias-before-batch-norm": (script(with_batch_norm, rate=0.01), "wiring"),
}


@pytest.mark.parametrize("name", sample(HEALTHY, "mixup", "average-inside", "statistics-of-a-frozen-base"))
def test_healthy_habits(name: str):
    factory, id = HEALTHY[name]
    (found,) = trainworthy.check(factory, only=id).verdicts
    assert found.verdict == ("skip" if name == "mixup" else "pass"), found


BUGS = {
    "declared-frozen-and-trains": (
        script(frozen=("0.",)),
        "wiring",
        "0. is declared frozen, and all of its 2 tensors are in an optimiser",
    ),
    "gradients-thrown-away": (
        script(loop=without_gradients),
        "wiring",
        "zero_grad() is called between backward() and step()",
    ),
    "optimiser-of-a-copy": (script(trains=copy.deepcopy), "wiring", "the optimiser holds parameters of another model"),
    "rate-far-too-low": (script(rate=1e-7), "overfit", "the rate is far too low: "),
    "rate-far-too-high": (script(rate=30.0), "overfit", "the rate is far too high"),
    "scores-never-negative": (
        script(lambda: nn.Sequential(*net(), nn.ReLU())),
        "loss-input",
        "a ReLU after the last layer",
    ),
}


@pytest.mark.parametrize("name", sample(BUGS, "gradients-thrown-away", "rate-far-too-high", "scores-never-negative"))
def test_the_first_cause_is_the_right_one(name: str):
    factory, id, words = BUGS[name]
    (found,) = trainworthy.check(factory, only=id, raises=False).verdicts
    assert found.verdict == "fail", found
    assert words in found.measured or found.remedy.startswith(words), found


@pytest.mark.parametrize("whole", [True, False], ids=["with-labels", "alone"])
def test_an_input_that_is_its_own_target(whole: bool):
    """An autoencoder, on samples with labels that nothing reads, and without."""

    def error(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.mse_loss(model(batch[0]), batch[0])

    def mean_error(model: nn.Module, loader: DataLoader) -> float:
        model.eval()
        with torch.no_grad():
            return sum(len(b[0]) * error(model, b).item() for b in loader) / len(loader.dataset)

    def factory() -> trainworthy.Script:
        model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64), nn.Sigmoid())
        train, val = (one if whole else TensorDataset(one.tensors[0]) for one in (TRAIN, VAL))
        return trainworthy.Script(model=model, optimizer=torch.optim.Adam(model.parameters(), 3e-3), train=train, val=val, loss=error,
                                  metric=mean_error, higher_is_better=False, floor=0.14)  # fmt: skip

    found = {v.id: v for v in trainworthy.check(factory, only="overfit,baseline,tiny-data").verdicts}
    assert found["overfit"].verdict == "pass", found
    assert all("nothing to exchange" in found[id].reason for id in ("baseline", "tiny-data")), found
