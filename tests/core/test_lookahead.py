"""`dependency` on sequences: no prediction may depend on the value that it must predict."""

from pydoc_data.topics import topics

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset
from trainworthy.core.gates import order

import trainworthy
from tests.helpers.sampling import sample

HISTORY, HORIZON = 24, 6


# ------------------------------------------------------------------------------------------------------------ forecasts
def series(n: int, seed: int) -> Tensor:
    """(n, 60): independent autoregressive series with innovations of variance 1, so no forecast has a smaller error."""
    draws = torch.Generator().manual_seed(seed)
    x = torch.zeros(n, 60)
    for t in range(2, 60):
        x[:, t] = 1.3 * x[:, t - 1] - 0.6 * x[:, t - 2] + torch.randn(n, generator=draws)
    return x[:, -40:]


class Windows(Dataset):
    """A history and what follows it; `gap` values lie between them (negative: they overlap)."""

    def __init__(self, n: int, seed: int, gap: int = 0, channel: bool = False):
        self.x, self.gap, self.channel = series(n, seed), gap, channel

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        start = HISTORY + self.gap
        x, y = self.x[i, :HISTORY], self.x[i, start : start + HORIZON]
        return (x[:, None], y) if self.channel else (x, y)


def error(model: nn.Module, loader: DataLoader) -> float:
    model.eval()
    with torch.no_grad():
        rows = [((model(x) - y).square().mean(1).sum(), len(y)) for x, y in loader]
    return float(sum(a for a, _ in rows)) / sum(n for _, n in rows)


def forecast(gap: int = 0, channel: bool = False) -> trainworthy.Script:
    model = nn.Sequential(nn.Flatten(), nn.Linear(HISTORY, 64), nn.ReLU(), nn.Linear(64, HORIZON))
    return trainworthy.Script(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3), train=Windows(1200, 1, gap, channel),
        val=Windows(300, 2, gap, channel), loss=lambda model, b: F.mse_loss(model(b[0]), b[1]), metric=error,
        higher_is_better=False, floor=float(series(1200, 1).var()), overfit_steps=400,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- next tokens
class Reader(nn.Module):
    """Predicts the next character at each place."""

    def __init__(self, masked: bool = True):
        super().__init__()
        self.masked = masked
        self.embed, self.places = nn.Embedding(64, 48), nn.Embedding(32, 48)
        self.layer = nn.TransformerEncoderLayer(48, 4, 96, 0.0, batch_first=True)
        self.head = nn.Linear(48, 64)

    def forward(self, ids: Tensor) -> Tensor:
        n = ids.shape[1]
        mask = torch.full((n, n), -torch.inf).triu(1).to(self.head.weight) if self.masked else None
        return self.head(self.layer(self.embed(ids) + self.places.weight[:n], src_mask=mask))


def texts() -> tuple[TensorDataset, TensorDataset]:
    whole = "".join(topics[k] for k in sorted(topics))
    ids = torch.tensor([min(63, max(0, ord(c) - 32) % 64) for c in whole])
    every = {tuple(row[:-1]): row for row in ids[: len(ids) // 25 * 25].view(-1, 25).tolist()}  # no input twice
    rows = torch.tensor([*every.values()][:900])
    return TensorDataset(rows[:700, :-1], rows[:700, 1:]), TensorDataset(rows[700:, :-1], rows[700:, 1:])


def right(model: nn.Module, loader: DataLoader) -> float:
    model.eval()
    with torch.no_grad():
        rows = [(int((model(x).argmax(2) == y).sum()), y.numel()) for x, y in loader]
    return sum(a for a, _ in rows) / sum(n for _, n in rows)


def spelling(masked: bool = True, shifted_in_the_loss: bool = False) -> trainworthy.Script:
    learn, held_out = texts()
    model = Reader(masked)
    if shifted_in_the_loss:
        learn, held_out = (TensorDataset(d.tensors[0], d.tensors[0]) for d in (learn, held_out))

    def loss(model: nn.Module, batch: list) -> Tensor:
        logits, ids = model(batch[0]), batch[1]
        if shifted_in_the_loss:
            logits, ids = logits[:, :-1], ids[:, 1:]
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())

    return trainworthy.Script(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3), train=learn, val=held_out, loss=loss, metric=right,
        floor=0.05, overfit_steps=500,
    )  # fmt: skip


def autoencoder() -> trainworthy.Script:
    """The target is the input: it may be read."""
    model = nn.Sequential(nn.Linear(40, 16), nn.ReLU(), nn.Linear(16, 40))
    learn, held_out = (TensorDataset(x, x) for x in (series(800, 1), series(200, 2)))
    return trainworthy.Script(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3), train=learn, val=held_out,
        loss=lambda model, b: F.mse_loss(model(b[0]), b[1]), metric=error, higher_is_better=False, floor=float(series(800, 1).var()),
    )  # fmt: skip


def delayed() -> trainworthy.Script:
    """The target is the past of the input."""
    model = nn.GRU(1, 24, batch_first=True)
    head = nn.Linear(24, 1)
    net = nn.ModuleDict({"core": model, "head": head})
    x = series(1000, 1)
    learn, held_out = (TensorDataset(v[:, 3:], v[:, :-3]) for v in (x[:800], x[800:]))

    def ask(net: nn.Module, x: Tensor) -> Tensor:
        return net["head"](net["core"](x[..., None])[0])[..., 0]

    return trainworthy.Script(
        model=net, optimizer=torch.optim.AdamW(net.parameters(), lr=3e-3), train=learn, val=held_out,
        loss=lambda net, b: F.mse_loss(ask(net, b[0]), b[1]), metric=lambda net, loader: 0.0, higher_is_better=False, floor=1.0,
    )  # fmt: skip


def earlier() -> list[str]:
    ids = [g.id for g in order.ORDER]
    return ids[: ids.index("dependency") + 1]


PLANTS = {
    "window-reaches-into-its-target": (lambda: forecast(-1), "entry 23"),
    "horizon-not-moved": (lambda: forecast(-HORIZON, channel=True), "entry"),
    "no-causal-mask": (lambda: spelling(masked=False), "mask that hides later places"),
    "no-causal-mask-shifted-in-the-loss": (lambda: spelling(masked=False, shifted_in_the_loss=True), "mask that hides later places"),
}  # fmt: skip
HEALTHY = {
    "forecast": forecast,
    "channel": lambda: forecast(channel=True),
    "masked": spelling,
    "masked-shifted-in-the-loss": lambda: spelling(shifted_in_the_loss=True),
    "autoencoder": autoencoder,
    "delayed": delayed,
}


@pytest.mark.parametrize("name", PLANTS)
def test_a_model_that_reads_its_target_is_stopped(name: str):
    """By `dependency` alone: the gates before it pass."""
    factory, words = PLANTS[name]
    result = trainworthy.check(factory, only=earlier(), raises=False)
    assert [v.id for v in result.failed] == ["dependency"], result.table()
    said = result.table(result.failed)
    assert "reads the value that it must predict" in said
    assert words in said


@pytest.mark.parametrize("name", sample(HEALTHY, "forecast", "masked", "delayed"))
def test_healthy_sequences_pass(name: str):
    result = trainworthy.check(HEALTHY[name], only="dependency", raises=False)
    assert result.ok, result.table()
    assert ("own value in the input" in result.table()) == (name in ("masked", "masked-shifted-in-the-loss"))
