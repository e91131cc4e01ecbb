"""`check` of scripts whose loss compares samples or places: contrastive losses, language models, forecasts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset
from trainworthy.core.data import alike

import trainworthy
from tests.core.test_check import TRAIN, VAL, accuracy

Loss = Callable[[nn.Module, Any], torch.Tensor]


class Views(Dataset):
    """Two noisy views of each picture; those of the evaluation are fixed."""

    def __init__(self, data: Dataset, fixed: bool, same: bool = False):
        self.data, self.fixed, self.same = data, fixed, same

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.data[i][0]
        drawn = torch.Generator().manual_seed(i) if self.fixed else None
        a, b = (x + 0.15 * torch.randn(x.shape, generator=drawn) for _ in range(2))
        return a, a if self.same else b


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.normalize(self.net(x.flatten(1)), dim=1)


def matched(model: nn.Module, loader: Any) -> float:
    model.eval()
    with torch.no_grad():
        a, b = (torch.cat([model(pair[k]) for pair in loader]) for k in (0, 1))
    return ((a @ b.T).argmax(1) == torch.arange(len(a))).float().mean().item()


def loop(loss: Loss) -> Callable[[nn.Module, Any, Any], None]:
    def train(model: nn.Module, optimizer: Any, batches: Any) -> None:
        model.train()
        for batch in batches:
            optimizer.zero_grad()
            loss(model, batch).backward()
            optimizer.step()

    return train


def contrastive(temperature: float = 0.2, shift: int = 0, same: bool = False) -> trainworthy.Script:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        scores = model(batch[0]) @ model(batch[1]).T / temperature
        own = torch.arange(len(scores)).roll(shift)
        return (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2

    model = Encoder()
    return trainworthy.Script(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), 2e-3), loss=loss, metric=matched, train_loop=loop(loss),
        train=DataLoader(Views(TRAIN, False, same), 64, shuffle=True, drop_last=True), val=Views(VAL, True, same), target=1,
    )  # fmt: skip


def causes(script: Callable[[], trainworthy.Script], *gates: str) -> dict[str, str]:
    torch.manual_seed(0)
    result = trainworthy.check(script, raises=False, only=list(gates))
    return {v.id: v.remedy for v in result.failed}


def test_a_contrastive_loss_compares_the_samples_of_a_batch():
    torch.manual_seed(0)
    result = trainworthy.check(contrastive, raises=False)
    assert result.ok, [(v.id, v.measured) for v in result.failed]
    (found,) = [v for v in result.verdicts if v.id == "dependency"]
    assert "softmax over scores of 4 x 4 for four samples" in found.reason


@pytest.mark.parametrize(
    ("settings", "gate", "cause"),
    [
        ({"shift": 1}, "dependency", "each sample is matched with another sample's view"),
        ({"same": True}, "dependency", "the two views of each sample, 'input' and 'target', are equal"),
        ({"temperature": 200.0}, "overfit", "the scores are bounded: they lie between"),
    ],
)
def test_what_is_wrong_in_a_contrastive_loss(settings: dict, gate: str, cause: str):
    assert causes(lambda: contrastive(**settings), gate)[gate].startswith(cause)


# ------------------------------------------------------------------------------------------------------- language models
LENGTH, WORDS = 24, 20


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.gru, self.head = (
            nn.Embedding(WORDS, 32),
            nn.GRU(32, 64, batch_first=True),
            nn.Linear(64, WORDS),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.gru(self.words(x))[0])


def texts(n: int, seed: int) -> TensorDataset:
    """Words that follow one another by a rule of the two words before, one of ten at random."""
    drawn = torch.Generator().manual_seed(seed)
    words = torch.randint(0, WORDS, (n, LENGTH + 1), generator=drawn)
    for t in range(2, LENGTH + 1):
        ruled = torch.rand(n, generator=drawn) < 0.9
        words[ruled, t] = (3 * words[ruled, t - 1] + words[ruled, t - 2] + 1) % WORDS
    return TensorDataset(words[:, :-1], words[:, 1:])


def of_all(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def of_the_last(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0])[:, -1], batch[1][:, -1])


def in_another_order(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]).transpose(0, 1).reshape(-1, WORDS), batch[1].flatten())


def surprise(model: nn.Module, loader: Any) -> float:
    model.eval()
    with torch.no_grad():
        return sum(of_all(model, batch).item() * len(batch[0]) for batch in loader) / len(loader.dataset)


def language(loss: Loss) -> trainworthy.Script:
    model = Reader()
    return trainworthy.Script(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), 3e-3), loss=loss, metric=surprise, train_loop=loop(loss),
        train=DataLoader(texts(1200, 0), 32, shuffle=True), val=texts(200, 1), higher_is_better=False, floor=3.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("loss", "gate", "cause"),
    [
        (of_the_last, "overfit", "the loss reads 1 of 24 places of 'target' that were tried"),
        (in_another_order, "dependency", "targets are compared with the answers to other samples"),
    ],
)
def test_which_places_a_loss_compares(loss: Loss, gate: str, cause: str):
    assert causes(lambda: language(loss), gate)[gate].startswith(cause)
    assert not causes(lambda: language(of_all), gate)


# ------------------------------------------------------------------------------------------------------------- forecasts
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_windows_of_a_series_that_repeats_are_no_copies(noise: float):
    drawn = torch.Generator().manual_seed(0)
    steps = torch.arange(3000)
    series = torch.sin(steps / 7) + 0.5 * torch.sin(steps / 23) + noise * torch.randn(3000, generator=drawn)
    windows = series.unfold(0, 32, 1)
    train, widths, shapes = alike.rows([[w] for w in windows[:2000]])
    val = alike.rows([[w] for w in windows[2100::5]])[0]
    score, at = alike.similarity(val, train, widths).max(1)
    near = (score >= alike.limit(widths, shapes)).nonzero().flatten()
    assert len(near) > 10
    assert alike.share_details(val[near], train[at[near]], widths, shapes).sum() <= 1


@pytest.mark.parametrize("seed", range(3))
def test_rows_that_were_copied_with_some_noise_are(seed: int):
    """Tables and embeddings, whose entries have no order, and a series with noise of its own."""
    drawn = torch.Generator().manual_seed(seed)
    walk = torch.randn(300, 64, generator=drawn).cumsum(1)
    for rows in (
        torch.randn(300, 64, generator=drawn),
        walk + 0.2 * walk.std() * torch.randn(300, 64, generator=drawn),
    ):
        copies = rows + 0.03 * rows.std() * torch.randn(300, 64, generator=drawn)
        found, widths, shapes = alike.rows([[row] for row in torch.cat([rows, copies])])
        assert alike.share_details(found[:300], found[300:], widths, shapes).float().mean() > 0.95


# ---------------------------------------------------------------------------------------------- losses whose floor is not known
class Coder(nn.Module):
    """A variational autoencoder of 64 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.mean, self.log_variance = (
            nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU()),
            *(nn.Linear(64, 8) for _ in range(2)),
        )
        self.decoder = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden = self.body(x)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        drawn = torch.randn_like(mean) * (0.5 * log_variance).exp() if self.training else 0
        return self.decoder(mean + drawn), mean, log_variance


def variational(weight: float) -> trainworthy.Script:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        made, mean, log_variance = model(batch[0])
        told = F.binary_cross_entropy_with_logits(made, batch[0].flatten(1), reduction="none").sum(1)
        return (told - weight * 0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1)).mean()

    def error(model: nn.Module, loader: Any) -> float:
        model.eval()
        with torch.no_grad():
            wrong = [F.mse_loss(model(x)[0].sigmoid(), x.flatten(1), reduction="sum").item() for x, *_ in loader]
        return sum(wrong) / 64 / len(loader.dataset)

    model = Coder()
    return trainworthy.Script(model=model, optimizer=torch.optim.Adam(model.parameters(), 3e-3), loss=loss, metric=error,
                              train=DataLoader(TRAIN, 32, shuffle=True), val=VAL, train_loop=loop(loss), higher_is_better=False,
                              floor=0.1)  # fmt: skip


def test_a_variational_autoencoder_and_one_whose_prior_weighs_too_much():
    assert not causes(lambda: variational(1.0))
    assert "overfit" in causes(lambda: variational(500.0), "overfit")


class Ordered(nn.Module):
    """One score and nine thresholds between ten classes in order."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
        self.thresholds = nn.Parameter(torch.linspace(-2, 2, 9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) - self.thresholds


def ordinal(squashed: bool) -> trainworthy.Script:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        scores = model(batch[0]).sigmoid() if squashed else model(batch[0])
        return F.binary_cross_entropy_with_logits(scores, (batch[1][:, None] > torch.arange(9)).float())

    def error(model: nn.Module, loader: Any) -> float:
        model.eval()
        with torch.no_grad():
            return sum(((model(x) > 0).sum(1) - y).abs().sum().item() for x, y in loader) / len(loader.dataset)

    model = Ordered()
    return trainworthy.Script(model=model, optimizer=torch.optim.Adam(model.parameters(), 5e-3), loss=loss, metric=error,
                              train=DataLoader(TRAIN, 32, shuffle=True), val=VAL, train_loop=loop(loss), higher_is_better=False,
                              floor=2.5)  # fmt: skip


def test_a_loss_that_falls_on_while_all_answers_are_right():
    assert not causes(lambda: ordinal(False), "overfit")
    assert "overfit" in causes(lambda: ordinal(True), "overfit")


def test_a_divergence_with_exchanged_arguments():
    torch.manual_seed(1)
    teacher = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.kl_div(teacher(batch[0]).softmax(1).detach(), model(batch[0]).log_softmax(1), reduction="batchmean")

    def script() -> trainworthy.Script:
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        return trainworthy.Script(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), loss=loss, metric=accuracy,
                                  train=DataLoader(TRAIN, 32, shuffle=True), val=VAL, train_loop=loop(loss), classes=10)  # fmt: skip

    found = causes(script, "schema", "loss-input")
    assert found["schema"].startswith("the loss is nan although inputs and weights are finite")
    assert found["loss-input"].startswith("the two are exchanged: kl_div(prediction, target)")


class Tagger(nn.Module):
    """Scores of three tags for each token, and of two kinds of text."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.hidden = nn.Embedding(24, 48), nn.Linear(48, 48)
        self.tags, self.kind = nn.Linear(48, 3), nn.Linear(48, 2)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.hidden(self.embedding(ids)).relu()
        return self.tags(hidden), self.kind(hidden.mean(1))


def tagged(mixed: bool) -> trainworthy.Script:
    """Class weights of tokens next to a second loss; `mixed`: the second loss compares with another text's kind."""

    def rows(n: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        ids = torch.randint(0, 24, (n, 6), generator=torch.Generator().manual_seed(seed))
        tags = (ids > 17).long() + (ids > 21)
        return [(a, b, ((a < 6).sum() > 1).long()) for a, b in zip(ids, tags, strict=True)]

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        scores, kinds = model(batch[0])
        due = batch[2].roll(1) if mixed else batch[2]
        first = F.cross_entropy(scores.flatten(0, 1), batch[1].flatten(), torch.tensor([1.0, 4.0, 9.0]))
        return first + 0.5 * F.cross_entropy(kinds, due)

    def right(model: nn.Module, loader: Any) -> float:
        model.eval()
        with torch.no_grad():
            hits = [(model(ids)[0].argmax(2) == tags).float().mean().item() for ids, tags, _ in loader]
        return sum(hits) / len(hits)

    model = Tagger()
    return trainworthy.Script(model=model, optimizer=torch.optim.AdamW(model.parameters(), 1e-2), loss=loss, metric=right,
                              train=DataLoader(rows(800, 0), 32, shuffle=True), val=rows(200, 1), train_loop=loop(loss),
                              target="1")  # fmt: skip


def test_class_weights_of_tokens_beside_another_loss():
    assert not causes(lambda: tagged(mixed=False), "dependency")
    assert "dependency" in causes(lambda: tagged(mixed=True), "dependency")
