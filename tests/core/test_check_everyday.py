"""`core.check` on what everyday scripts do: their shapes of samples, batches, masks, losses and metrics raise no false alarm."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, TensorDataset
from trainworthy.core.base.errors import UserError
from trainworthy.core.data import inventory
from trainworthy.core.gates.causes import dependence
from trainworthy.core.recipe.stage import Data, Field
from trainworthy.guard.adapters import entries, next_token
from trainworthy.guard.adapters.script import Result

import trainworthy
from tests.core.test_check import HELD_OUT, LEARN, X, Y, accuracy, net, script, tokens
from tests.core.test_check_scores import loop

EARLY = ("schema", "data", "leakage", "wiring", "dependency")


def passed(factory: Callable, *only: str) -> Result:
    result = trainworthy.check(factory, only=only, raises=False)
    assert not [v.id for v in result.verdicts if v.verdict != "pass"], result.table()
    return result


# ------------------------------------------------------------------------------------------------ entries and their names
def test_an_entry_of_a_pair_by_its_position():
    passed(script(target="1"), "schema")
    passed(script(target=1), "schema")
    passed(script(classes=None, fields={"0": Field("input"), "1": Field("target", classes="0123456789")}), "data")
    with pytest.raises(UserError, match="which is no entry"):
        trainworthy.check(script(fields={"0": Field("input"), "7": Field("target")}))


def test_targets_with_a_class_for_each_position():
    passed(
        tokens(fields=None, target="1", classes=2, count=lambda batch: batch[2].sum()),
        *EARLY,
        "overfit",
        "baseline",
        "tiny-data",
    )


def as_dict(rows: list) -> dict[str, Tensor]:
    return {"pixels": torch.stack([x for x, *_ in rows]), "sum": torch.stack([x.sum() for x, *_ in rows]),
            "label": torch.tensor([int(row[1]) for row in rows])}  # fmt: skip


def by_dict(rows: Callable[[Tensor], list], **parts: Any) -> Callable:
    """The digits, with a collate that makes a dict."""

    def score(model: nn.Module, loader: Any) -> float:
        model.eval()
        with torch.no_grad():
            return sum((model(b["pixels"]).argmax(1) == b["label"]).sum().item() for b in loader) / len(loader.dataset)

    whole = {"train": rows(LEARN), "val": rows(HELD_OUT), "collate": as_dict, "metric": score,
             "loss": lambda model, b: F.cross_entropy(model(b["pixels"]), b["label"])}  # fmt: skip
    return script(**{**whole, "train_loop": None, **parts})


@pytest.mark.parametrize("target", ["1", "label", None])
def test_a_collate_that_makes_a_dict_of_tuples(target: str | None):
    result = passed(by_dict(lambda at: [(X[i], int(Y[i])) for i in at], target=target), *EARLY, "overfit", "baseline")
    assert "pixels (2, 64)" in result.table(), result.table()


def test_a_collate_that_leaves_out_an_entry():
    rows = lambda at: [(X[i], int(Y[i]), ["a", "list"]) for i in at]  # noqa: E731
    passed(by_dict(rows, target="1"), "schema", "data")
    with pytest.raises(UserError, match="collate drops '2'"):
        trainworthy.check(by_dict(rows, target="2"), only="schema")


# ------------------------------------------------------------------------------------------------------- similar samples
class Inputs(Data):
    def __init__(self, **values: Any):
        self.values, self.fields = values, {k: Field("input") for k in values}

    def __len__(self) -> int:
        return len(next(iter(self.values.values())))

    def get(self, index: int, generator: torch.Generator | None) -> dict[str, Any]:
        return {k: v[index] for k, v in self.values.items()}


def overlap(train: Inputs, val: Inputs) -> dict[str, Any]:
    return inventory.overlap(inventory.scan("train", train), inventory.scan("val", val))


def test_samples_are_near_if_all_of_their_inputs_are():
    draw = torch.Generator().manual_seed(0)
    load, other = torch.randn(40, 60, generator=draw), torch.randn(10, 60, generator=draw)
    hours, scale = torch.linspace(0, 9, 300).sin().repeat(40, 1), 100 * torch.rand(40, generator=draw)
    noisy = load[:3] + 0.001 * torch.randn(3, 60, generator=draw)
    train = Inputs(load=load, hours=hours, scale=scale)
    assert overlap(train, Inputs(load=other, hours=hours[:10], scale=scale[:10]))["near"] == 0
    found = overlap(train, Inputs(load=torch.cat([noisy, other[3:]]), hours=hours[:10], scale=scale[:10]))
    assert (found["exact"], found["near"]) == (0, 3)
    assert overlap(train, Inputs(load=noisy, hours=hours[:3], scale=scale[3:6]))["near"] < 3  # the third input differs


def test_a_calendar_does_not_make_windows_of_a_series_alike():
    draw = torch.Generator().manual_seed(0)
    clock = (torch.arange(48) * 2 * torch.pi / 24).unsqueeze(1)
    calendar = torch.cat([clock.sin(), clock.cos(), clock.cos().sign()], 1)

    def windows(n: int) -> Tensor:
        return torch.cat([0.1 * torch.randn(n, 48, 1, generator=draw), calendar.expand(n, 48, 3)], 2)

    train, other = windows(60), windows(10)
    assert overlap(Inputs(x=train), Inputs(x=other))["near"] == 0
    copies = train[:3] * torch.tensor([1.01, 1, 1, 1])
    assert overlap(Inputs(x=train), Inputs(x=torch.cat([copies, other[3:]])))["near"] == 3


def test_short_texts_may_repeat_in_both_splits_as_often_as_in_one():
    draw = torch.Generator().manual_seed(0)
    words = torch.randint(0, 10**6, (3000, 8), generator=draw)
    words[torch.randperm(3000, generator=draw)[:60]] = words[:60].clone()  # random repeats
    words = words[torch.randperm(3000, generator=draw)]
    val, train = words[:600], words[600:]
    found = overlap(Inputs(words=train), Inputs(words=val))
    assert 0 < found["exact"] <= found["expected"] + 3 * found["expected"] ** 0.5
    copied = torch.cat([train.unique(dim=0), val[:20]])
    found = overlap(Inputs(words=copied), Inputs(words=val.unique(dim=0)))
    assert found["exact"] >= 20
    assert found["expected"] < 1
    assert "expected" not in overlap(
        Inputs(words=train.float()), Inputs(words=val.float())
    )  # measured numbers do not repeat


@pytest.mark.parametrize(("copies", "verdict"), [(0, "pass"), (60, "fail")])
def test_the_gate_on_short_texts(copies: int, verdict: str):
    draw = torch.Generator().manual_seed(0)
    words = torch.randint(0, 10**6, (2000, 8), generator=draw)
    words[:20], labels = words[1000:1020], torch.arange(2000) % 10
    words[1500:1505] = words[:5]
    rows = [(x, int(y)) for x, y in zip(words, labels, strict=True)]
    train, val = rows[:1400] + rows[1500 : 1500 + copies], rows[1400:]
    model = lambda: nn.Sequential(nn.EmbeddingBag(10**6, 4), nn.Linear(4, 10))  # noqa: E731
    result = trainworthy.check(script(model, train=train, val=val), only="leakage", raises=False)
    assert result.verdicts[0].verdict == verdict, result.table()
    assert "expected by chance" in result.table()


# -------------------------------------------------------------------------------------------------- masks, blank inputs
def masked(model: nn.Module, b: dict) -> Tensor:
    return ((model(b["x"]) - b["y"]).abs() * b["mask"]).sum() / b["mask"].sum()


def masked_error(model: nn.Module, loader: Any) -> float:
    model.eval()
    total = count = 0.0
    with torch.no_grad():
        for b in loader:
            total += ((model(b["x"]) - b["y"]).abs() * b["mask"]).sum().item()
            count += b["mask"].sum().item()
    return total / count


def forecast(**parts: Any) -> trainworthy.Script:
    """A regression of 4 numbers whose mask is an entry of the batch."""
    draw = torch.Generator().manual_seed(0)
    x, mask = torch.randn(300, 12, generator=draw), (torch.rand(300, 4, generator=draw) < 0.8).float()
    y = x @ torch.randn(12, 4, generator=draw) / 3
    rows = [{"x": a, "mask": m, "y": b} for a, m, b in zip(x, mask, y, strict=True)]
    model = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 4))
    whole = {"loss": masked, "metric": masked_error, "target": "y", "count": lambda b: b["mask"].sum().item()}
    return trainworthy.Script(
        model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-2), train=rows[:250], val=rows[250:], higher_is_better=False,
        floor=0.8, **{**whole, **parts})  # fmt: skip


def test_a_mask_of_the_targets_is_no_input():
    passed(forecast, "dependency", "baseline")


def test_what_counts_as_a_mask():
    def roles(count: Callable | None, **values: Any) -> dict[str, str]:
        rows = [{k: v[i] for k, v in values.items()} for i in range(len(values["y"]))]
        made = trainworthy.Script(
            model=net(), optimizer=None, train=rows, val=rows, loss=None, metric=None, target="y", count=count
        )  # type: ignore[arg-type]
        return {k: f.role for k, f in entries.fields(made, entries.samples(made, rows, fixed=True)).items()}

    flags, ids = torch.tensor([[0, 1, 1], [1, 1, 0]] * 4), torch.randint(2, 9, (8, 3))
    of_ids = lambda b: (b["x"] != 0).sum()  # noqa: E731
    assert roles(None, x=ids, mask=flags, y=ids)["mask"] == "extent"
    assert roles(None, x=flags, y=ids) == {"x": "input", "y": "target"}  # the only input
    assert roles(None, x=ids, flag=torch.tensor([0, 1] * 4), y=torch.arange(8))["flag"] == "input"
    assert roles(lambda b: b["n"].sum(), x=ids, n=torch.tensor([1, 2] * 4), y=ids)["n"] == "extent"
    assert roles(of_ids, x=ids, age=torch.rand(8), y=ids)["x"] == "input"


def test_a_metric_that_fails_on_blank_inputs_is_a_skip():
    def score(model: nn.Module, loader: Any) -> float:
        seen = sum(x.abs().sum().item() for x, _ in loader)
        return accuracy(model, loader) * seen / seen

    (verdict,) = trainworthy.check(script(metric=score), only="baseline", raises=False).verdicts
    assert verdict.verdict == "skip"
    assert "blank inputs raise ZeroDivisionError" in verdict.reason


def test_a_metric_that_needs_more_than_eight_samples_is_a_skip():
    def recall(model: nn.Module, loader: Any) -> float:
        """Share of samples that are among the ten of their label's highest scores."""
        model.eval()
        with torch.no_grad():
            scores, labels = (torch.cat(some) for some in zip(*((model(x), y) for x, y in loader), strict=True))
        best = scores[:, labels].topk(min(10, len(labels)), dim=0).indices
        return (best == torch.arange(len(labels))).any(0).float().mean().item()

    (verdict,) = trainworthy.check(script(metric=recall, floor=0.0), only="baseline", raises=False).verdicts
    assert (verdict.verdict, "cannot tell on eight samples" in verdict.reason) == ("skip", True), verdict


# ---------------------------------------------------------------------------------------------- rows of different lengths
class Tagger(nn.Module):
    """Tags each token by its own vector, and by the mean of those of its text: of its own tokens, or of the padding, too."""

    def __init__(self, careless: bool):
        super().__init__()
        self.careless = careless
        self.embedding = nn.Embedding(40, 16, padding_idx=0)
        self.head = nn.Linear(32, 4)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        if self.careless:
            x = x + 0.5  # of the padding, too
        mean = x.mean(1) if self.careless else x.sum(1) / (ids > 0).sum(1, keepdim=True)
        return self.head(torch.cat([x, mean[:, None].expand_as(x)], 2))


def tags_loss(model: nn.Module, b: dict) -> Tensor:
    return F.cross_entropy(model(b["ids"]).flatten(0, 1), b["tags"].flatten(), ignore_index=-100)


def tagging(careless: bool) -> Callable:
    draw = torch.Generator().manual_seed(0)
    rows = [(ids := torch.randint(1, 40, (4 + i % 6,), generator=draw), ids % 4) for i in range(400)]

    def collate(rows: list) -> dict[str, Tensor]:
        ids, tags = zip(*rows, strict=True)
        return {
            "ids": pad_sequence(ids, batch_first=True),
            "tags": pad_sequence(tags, batch_first=True, padding_value=-100),
        }

    def right(model: nn.Module, loader: Any) -> float:
        model.eval()
        hit = total = 0
        with torch.no_grad():
            for b in loader:
                scored = b["tags"] >= 0
                hit, total = (
                    hit + ((model(b["ids"]).argmax(2) == b["tags"]) & scored).sum().item(),
                    total + scored.sum().item(),
                )
        return hit / total

    return script(lambda: Tagger(careless), lr=2e-2, train=rows[:300], val=rows[300:], collate=collate, target="1", classes=4,
                  loss=tags_loss, metric=right, train_loop=None)  # fmt: skip


def test_a_mean_over_tokens_is_no_mixture_but_unmasked_padding_is():
    result = passed(tagging(careless=False), "dependency")
    assert "of samples of one length" in result.table()
    result = trainworthy.check(tagging(careless=True), only="dependency", raises=False)
    assert not result.ok, result.table()


def test_blank_inputs_may_be_known_by_their_lengths():
    passed(tagging(careless=False), "overfit", "baseline")


def test_a_plain_sum_is_no_broadcast():
    additive = SimpleNamespace(loss=lambda some, targets=None: float(sum((i + 1) ** 2 for i in some)), data=SimpleNamespace(fields={}),
                               same=lambda a, b: abs(a - b) < 1e-6)  # fmt: skip
    assert dependence._in_the_loss(additive, [0, 1, 2, 3]) == ""


# -------------------------------------------------------------------------------------------------------- the next token
def test_the_lowest_loss_of_next_tokens():
    x = torch.tensor([[0, 5, 6], [0, 7, 6], [0, 7, 8], [0, 7, 8]])
    y = torch.tensor([[5, 6, 0], [7, 6, 0], [7, 8, -1], [7, 8, 0]])
    first = -(torch.tensor([0.25, 0.75, 0.75, 0.75]).log().sum())  # 5 or 7
    second = -(torch.tensor([1 / 3, 2 / 3, 2 / 3]).log().sum())  # what follows 0 7
    assert next_token.lowest_loss(x, y) == pytest.approx(((first + second) / 11).item())


def test_a_model_of_characters_memorises_all_but_the_first():
    draw = torch.Generator().manual_seed(0)
    text = torch.randint(1, 20, (300, 6), generator=draw)
    rows = [(torch.cat([torch.zeros(1).long(), t[:-1]]), t) for t in text]

    class Causal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.rnn, self.head = (
                nn.Embedding(20, 16),
                nn.GRU(16, 48, batch_first=True),
                nn.Linear(48, 20),
            )

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.rnn(self.embedding(ids))[0])

    def loss(model: nn.Module, b: list) -> Tensor:
        return F.cross_entropy(model(b[0]).transpose(1, 2), b[1])

    def nats(model: nn.Module, loader: Any) -> float:
        model.eval()
        with torch.no_grad():
            return sum(loss(model, b).item() * len(b[0]) for b in loader) / len(loader.dataset)

    passed(script(Causal, lr=1e-2, train=rows[:250], val=rows[250:], loss=loss, metric=nats, classes=20, train_loop=None,
                  higher_is_better=False, floor=3.0), "overfit")  # fmt: skip


# ------------------------------------------------------------------------------------------------ tables of users and products
USERS, ITEMS, RATED = 80, 60, 4000


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, 8), nn.Embedding(ITEMS, 8)

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        return (self.users(user) * self.items(item)).sum(1)


def ratings(shuffled: bool) -> trainworthy.Script:
    drawn = torch.Generator().manual_seed(5)
    pairs = torch.randperm(USERS * ITEMS, generator=drawn)[:RATED]
    user, item = pairs // ITEMS, pairs % ITEMS
    tastes, kinds = torch.randn(USERS, 4, generator=drawn), torch.randn(ITEMS, 4, generator=drawn)
    rating = (tastes[user] * kinds[item]).sum(1) + 0.2 * torch.randn(RATED, generator=drawn)
    if shuffled:
        rating = rating[torch.randperm(RATED, generator=drawn)]
    torch.manual_seed(0)
    model = Tables()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(model(*batch[:2]), batch[2])

    def mse(model: nn.Module, loader: Any) -> float:
        model.eval()
        with torch.no_grad():
            return sum(loss(model, batch).item() * len(batch[2]) for batch in loader) / len(loader.dataset)

    cut = RATED * 4 // 5
    return trainworthy.Script(
        model=model, optimizer=torch.optim.Adam(model.parameters(), 2e-2), loss=loss, metric=mse, train_loop=loop(loss), target=2,
        train=DataLoader(TensorDataset(user[:cut], item[:cut], rating[:cut]), 64, shuffle=True),
        val=TensorDataset(user[cut:], item[cut:], rating[cut:]), higher_is_better=False, floor=float(rating.var()),
    )  # fmt: skip


def test_what_each_user_needs_samples_for_is_tried_on_more_of_them():
    healthy, shuffled = (
        trainworthy.check(lambda s=s: ratings(s), raises=False, only=["tiny-data"]) for s in (False, True)
    )
    assert healthy.ok, healthy.failed
    assert "on 2048 samples" in healthy.verdicts[0].measured
    assert not shuffled.ok
