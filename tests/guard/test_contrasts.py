"""Mistakes of losses that compare samples, windows, codes or thresholds, found in a loop that is watched once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from trainworthy.guard.measures.losses.contrasts import LATE, Contrasts

import trainworthy

ROWS = torch.randn(512, 6, generator=torch.Generator().manual_seed(0)) @ torch.randn(
    6, 32, generator=torch.Generator().manual_seed(1)
)


def looped(
    model: nn.Module, loss: Callable[[nn.Module, Any], torch.Tensor], data: TensorDataset, size: int = 32
) -> trainworthy.Loop:
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)

    def run(batches: Any) -> None:
        for batch in batches:
            optimizer.zero_grad()
            loss(model, batch).backward()
            optimizer.step()

    return trainworthy.Loop(
        models=model,
        optimizers=optimizer,
        run=run,
        batches=DataLoader(data, size, shuffle=True),
        steps=LATE + 16,
        seconds=0.5,
    )


def found(factory: Callable[[], trainworthy.Loop], gate: str) -> tuple[str, str]:
    torch.manual_seed(0)
    (verdict,) = trainworthy.check(factory, raises=False, only=[gate]).verdicts
    return verdict.verdict, verdict.remedy


def two_views(bug: str) -> trainworthy.Loop:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        (x,) = batch
        n, one = len(x), x + 0.3 * torch.randn_like(x)
        other = one if bug == "same" else x + 0.3 * torch.randn_like(x)
        z = F.normalize(model(torch.cat([one, other])), dim=1)
        scores = z @ z.T / (20.0 if bug == "temperature" else 0.2)
        if bug != "diagonal":
            scores = scores.masked_fill(torch.eye(2 * n, dtype=torch.bool), -1e9)
        places = torch.arange(2 * n)
        return F.cross_entropy(scores, places if bug == "own" else places.roll(n))

    return looped(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16)), loss, TensorDataset(ROWS))


@pytest.mark.parametrize(
    ("bug", "cause"),
    [
        ("", ""),
        ("own", "a sample's target is its own place, which is masked"),
        ("diagonal", "the diagonal is not masked"),
        ("same", "the two views of a sample are the same"),
        ("temperature", "the temperature divides the scores"),
    ],
)
def test_two_views_of_a_batch(bug: str, cause: str):
    verdict, remedy = found(lambda: two_views(bug), "loss-input")
    assert verdict == ("fail" if bug else "pass")
    assert remedy.startswith(cause)


def test_products_of_small_vectors_start_as_narrow_and_are_no_fault():
    """Two tables of embeddings with in-batch negatives, at a small rate: after hundreds of steps the scores still differ by little."""

    def towers() -> trainworthy.Loop:
        model = nn.ModuleList(nn.Embedding(300, 32) for _ in range(2))
        for table in model:
            nn.init.normal_(table.weight, std=0.01)
        users = torch.arange(300).repeat(8)
        optimizer = torch.optim.Adam(model.parameters(), 1e-4)

        def run(batches: Any) -> None:
            for user, item in batches:
                optimizer.zero_grad()
                F.cross_entropy(model[0](user) @ model[1](item).T, torch.arange(len(user))).backward()
                optimizer.step()

        pairs = TensorDataset(users, users * 7 % 300)
        return trainworthy.Loop(
            models=model, optimizers=optimizer, run=run, batches=DataLoader(pairs, 64, shuffle=True)
        )

    assert found(towers, "loss-input")[0] == "pass"


def test_a_loss_of_one_sample_is_none_of_a_batch():
    seen = Contrasts()
    seen.note(torch.randn(6, requires_grad=True), torch.tensor(2))
    assert seen.calls == 0


class Coder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean, self.log_variance, self.decoder = nn.Linear(32, 8), nn.Linear(32, 8), nn.Linear(8, 32)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mean, log_variance = self.mean(x), self.log_variance(x)
        return self.decoder(mean + torch.randn_like(mean) * (0.5 * log_variance).exp()), mean, log_variance


def variational(sign: float) -> trainworthy.Loop:
    """The weight of the KL term grows from 0."""
    steps = iter(range(10**6))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        made, mean, log_variance = model(batch[0])
        divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1).mean()
        return F.mse_loss(made, batch[0], reduction="sum") / len(made) + sign * min(1.0, next(steps) / 50) * divergence

    return looped(Coder(), loss, TensorDataset(ROWS))


def test_a_divergence_that_is_made_larger():
    assert found(lambda: variational(1.0), "direction")[0] == "pass"
    verdict, remedy = found(lambda: variational(-1.0), "direction")
    assert verdict == "fail"
    assert remedy.startswith("it is -0.5 * sum(1 + log-variance")


def forecast(early: int, reconstruct: bool = False) -> trainworthy.Loop:
    steps = torch.arange(800.0)
    series = torch.sin(steps / 7) + 0.2 * torch.randn(800, generator=torch.Generator().manual_seed(0))
    windows = series.unfold(0, 24, 1)
    x, y = windows[:, :20], windows[:, :20] if reconstruct else windows[:, 20 - early : 24 - early]
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, y.shape[1]))
    return looped(model, lambda m, b: F.mse_loss(m(b[0]), b[1]), TensorDataset(x, y))


def test_the_first_step_to_predict_is_in_the_window():
    assert found(lambda: forecast(0), "targets")[0] != "fail"
    assert found(lambda: forecast(0, reconstruct=True), "targets")[0] != "fail"
    verdict, remedy = found(lambda: forecast(1), "targets")
    assert verdict == "fail"
    assert "the window ends one step too late" in remedy


def thresholds(at_least: bool) -> trainworthy.Loop:
    classes = ROWS[:, 0].argsort().argsort() * 6 // len(ROWS)
    y = (classes[:, None] >= torch.arange(5)) if at_least else (classes[:, None] > torch.arange(5))
    model = nn.Linear(32, 5)
    return looped(model, lambda m, b: F.binary_cross_entropy_with_logits(m(b[0]), b[1]), TensorDataset(ROWS, y.float()))


def test_cumulative_targets_that_are_one_class_too_high():
    assert found(lambda: thresholds(False), "targets")[0] != "fail"
    verdict, remedy = found(lambda: thresholds(True), "targets")
    assert verdict == "fail"
    assert remedy.startswith("cumulative targets are y > k for k from 0")


def moons(twice: bool) -> trainworthy.Loop:
    """Two numbers a sample."""
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.05, 200), 0)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        t, noise = torch.randint(0, 200, (len(batch[0]),)), torch.randn_like(batch[0])
        share = kept[t, None]
        noisy = share.sqrt() * batch[0] + (1 - share).sqrt() * noise
        return F.mse_loss(model(torch.cat([noisy, t[:, None] / 200], 1)), torch.randn_like(noise) if twice else noise)

    net = nn.Sequential(nn.Linear(3, 64), nn.SiLU(), nn.Linear(64, 2))
    return looped(net, loss, TensorDataset(ROWS[:, :2].repeat(2, 1)), 256)


def test_noise_that_is_drawn_twice_for_samples_of_two_numbers():
    assert found(lambda: moons(False), "noise")[0] != "fail"
    verdict, remedy = found(lambda: moons(True), "noise")
    assert verdict == "fail"
    assert remedy.startswith("the noise is drawn twice")
