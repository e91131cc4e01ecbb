"""`check` of setups that real work has: a decoder's input beside its target, series of one column, lines that repeat, short schedules."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from trainworthy.core.data import alike
from trainworthy.core.gates.checks import repeats, tiny_data
from trainworthy.core.gates.checks.null_model import Retrained
from trainworthy.core.gates.checks.tiny_data import Skill
from trainworthy.guard.adapters.one_cycle import keep_last_rate

import trainworthy
from tests.core.test_check import TRAIN, accuracy, loss, net, script
from tests.core.test_check_scores import loop


def failures(factory: Callable[[], Any], only: str, seed: int = 0) -> dict[str, str]:
    """Gate -> what it printed, of those that failed."""
    result = trainworthy.check(factory, only=only, seed=seed, raises=False)
    return {v.id: f"{v.measured} | {v.cause} | {v.remedy}" for v in result.verdicts if v.blocks}


# ------------------------------------------------------------------------------------- several entries of one of a sample's
class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.source, self.target, self.out = nn.Embedding(12, 16), nn.Embedding(12, 16), nn.Linear(16, 12)

    def forward(self, source: Tensor, before: Tensor) -> Tensor:
        return self.out(self.target(before) + self.source(source).mean(1, keepdim=True))


def shifted(samples: list) -> dict[str, Tensor]:
    source, target = (torch.stack(part) for part in zip(*samples, strict=True))
    return {"source": source, "decoder_in": target[:, :-1], "decoder_out": target[:, 1:]}


def translation(target: str) -> trainworthy.Script:
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(1, 12, (300, 5), generator=draw)
    rows = [(a, torch.cat([torch.zeros(1, dtype=torch.long), a.flip(0)])) for a in x]

    def of(model: nn.Module, b: dict) -> Tensor:
        return F.cross_entropy(model(b["source"], b["decoder_in"]).transpose(1, 2), b["decoder_out"])

    def right(model: nn.Module, loader: Any) -> float:
        model.eval()
        with torch.no_grad():
            found = [
                (model(b["source"], b["decoder_in"]).argmax(2) == b["decoder_out"]).float().mean(1) for b in loader
            ]
        return torch.cat(found).mean().item()

    model = Translator()
    return trainworthy.Script(
        model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-2), train=rows[:250], val=rows[250:], collate=shifted,
        target=target, classes=12, loss=of, metric=right,
    )  # fmt: skip


@pytest.mark.parametrize("target", ["decoder_out", "decoder_in", "1"])
def test_the_target_is_the_entry_of_the_batch_that_the_script_names(target: str):
    assert not failures(lambda: translation(target), "schema")


# --------------------------------------------------------------------------------------------------------- what repeats
@pytest.mark.parametrize("shape", [(32,), (32, 1), (1, 32)])
def test_windows_of_one_series_in_any_shape_are_no_copies(shape: tuple[int, ...]):
    steps = torch.arange(3000)
    windows = (torch.sin(steps / 7) + 0.5 * torch.sin(steps / 23)).unfold(0, 32, 1)
    train, widths, shapes = alike.rows([[w.reshape(shape)] for w in windows[:2000]])
    val = alike.rows([[w.reshape(shape)] for w in windows[2100::5]])[0]
    score, at = alike.similarity(val, train, widths).max(1)
    near = (score >= alike.limit(widths, shapes)).nonzero().flatten()
    assert len(near) > 10
    assert alike.share_details(val[near], train[at[near]], widths, shapes).sum() <= 1


def test_windows_with_one_edge_are_no_copies_of_each_other():
    """Lines of a photograph: flat, with a step anywhere and a little noise."""
    draw = torch.Generator().manual_seed(0)
    place = torch.randint(4, 28, (1000, 1), generator=draw)
    rows = (torch.arange(32) >= place).float() + 0.02 * torch.randn(1000, 32, generator=draw)
    contents, widths, shapes = alike.rows([[row] for row in rows])
    train, val = contents[:800], contents[800:]
    score, at = alike.similarity(val, train, widths).max(1)
    near = (score >= alike.limit(widths, shapes)).nonzero().flatten()
    assert len(near) > 10
    assert not alike.share_details(val[near], train[at[near]], widths, shapes).any()


def lines(copied: bool) -> tuple[list, list]:
    """Lines of tokens, the short ones among them of few kinds; `copied`: 60 lines of any length are in both splits."""
    draw = torch.Generator().manual_seed(0)
    rows = []
    for i in range(1000):
        short = torch.rand(1, generator=draw).item() < 0.3
        words = torch.randint(1, 4 if short else 10**4, (3 if short else 9,), generator=draw)
        rows.append((F.pad(words, (0, 9 - len(words))) if copied else words, i % 10))
    return rows[:700] + (rows[700:760] if copied else []), rows[700:]


def pad(samples: list) -> list[Tensor]:
    return [pad_sequence([x for x, _ in samples], batch_first=True), torch.tensor([y for _, y in samples])]


@pytest.mark.parametrize("copied", [False, True])
def test_short_lines_may_repeat_and_copied_ones_may_not(copied: bool):
    train, val = lines(copied)
    bag = lambda: nn.Sequential(nn.EmbeddingBag(10**4, 4), nn.Linear(4, 10))  # noqa: E731
    found = failures(script(bag, train=train, val=val, collate=pad), "leakage")
    assert bool(found) == copied, found


@pytest.mark.parametrize(("lengths", "natural"), [([4.0, 9.0], True), ([9.0, 9.0], False), ([], False)])
def test_copies_of_all_lengths_were_duplicated(lengths: list[float], natural: bool):
    found = {"compared": {"exact": (400, 1600)}, "exact": 92, "expected": 145.0, "lengths": lengths}
    assert repeats.repeat_naturally(found)[0] == natural


@pytest.mark.parametrize(
    ("copies", "expected", "repeated"), [(92, 90.0, True), (92, 0.0, False), (390, 385.0, False), (300, 90.0, False)]
)
def test_a_random_split_of_repeated_samples_is_named(copies: int, expected: float, repeated: bool):
    found = {"compared": {"exact": (400, 1600)}, "exact": copies, "by_repeats": expected}
    assert repeats.repeated_before(found).startswith("samples were repeated before the split") == repeated


# ------------------------------------------------------------------------------------------- gates that need many samples
def test_a_narrow_result_on_more_samples_is_repeated_on_as_many(monkeypatch: pytest.MonkeyPatch):
    """Users and products need samples of their own: on 256 nothing carries over."""
    tried = []

    def measured(context: Any, *, n: int, **_: Any) -> dict:
        tried.append(n)
        carried = Skill(0.5, 0.1, 0.01, gap=0.12 if n > 256 else 0.01, needed=0.1)
        return {"samples": n, "held_out_curve": [], "steps": 480, "at_most": 480, "in_time": True, "losses": [1.0], "classes": 0,
                "train": Skill(1.0, 0.1, 0.01, gap=0.9, needed=0.1), "held_out": carried, "test": None, "behind": "", "exchanged": [],
                "retrain": lambda: Retrained(0.1, 1.0, 2.0, gap=0.0)}  # fmt: skip

    monkeypatch.setattr(tiny_data, "_train_on_few", measured)
    assert not failures(script(), "tiny-data")
    assert tried[-2:] == [tiny_data.MORE, tiny_data.MORE]


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(50, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.words(x).mean(1))  # padding counts


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_padding_is_named_where_only_a_large_batch_has_it(seed: int):
    draw = torch.Generator().manual_seed(0)
    rows = [(torch.randint(1, 50, (12 if i % 16 == 0 else 4,), generator=draw), i % 10) for i in range(400)]
    found = failures(script(Pooled, train=rows[:320], val=rows[320:], collate=pad), "dependency", seed)
    assert "padding is not masked" in found["dependency"], found


# ----------------------------------------------------------------------------------------------------- schedules of the loop
def one_cycle(total: int) -> Callable[[], trainworthy.Script]:
    """A loop that steps OneCycleLR after every batch; an epoch has 45 of them."""

    def factory() -> trainworthy.Script:
        built = net()
        optimizer = torch.optim.SGD(built.parameters(), lr=0.02)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=total)

        def train(model: nn.Module, optimizer: Any, batches: Any) -> None:
            model.train()
            for batch in batches:
                optimizer.zero_grad()
                loss(model, batch).backward()
                optimizer.step()
                schedule.step()

        whole = {"train": TRAIN, "val": TRAIN, "classes": 10}
        return trainworthy.Script(
            model=built, optimizer=optimizer, loss=loss, metric=accuracy, train_loop=train, **whole
        )

    return factory


def test_a_gate_may_take_more_steps_than_the_schedule_has():
    assert "raised" not in str(failures(one_cycle(90), "overfit"))
    assert "Tried to step" in str(failures(one_cycle(20), "overfit")), "made for epochs, stepped after batches"


@pytest.mark.parametrize(("epoch", "passes", "held"), [(10, 0, True), (30, 0, False), (30, 25, True)])
def test_one_cycle_keeps_its_last_rate(epoch: int, passes: int, held: bool):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20)
    own = torch.optim.lr_scheduler.OneCycleLR.get_lr
    with keep_last_rate(epoch, lambda: passes):
        for _ in range(20):
            optimizer.step()
            schedule.step()
        last = schedule.get_last_lr()
        if held:
            schedule.step()
            assert schedule.get_last_lr() == last
        else:
            with pytest.raises(ValueError, match="Tried to step"):
                schedule.step()
    assert torch.optim.lr_scheduler.OneCycleLR.get_lr is own


# --------------------------------------------------------------------------------------------------- learnt weights of terms
class TwoTerms(nn.Module):
    """A classifier with a learnt log-variance for each of two terms."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.log_var = net(), nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def of_terms(weight: Callable[[Tensor, Tensor], Tensor]) -> Callable[[nn.Module, list], Tensor]:
    def both(model: nn.Module, batch: list) -> Tensor:
        out = model(batch[0])
        return weight(model.log_var, torch.stack([F.cross_entropy(out, batch[1]), 0.1 * out.square().mean()])).sum()

    return both


WEIGHTS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "by uncertainty": (lambda s, x: torch.exp(-s) * x + s / 2, ""),
    "sigma": (lambda s, x: x / (2 * (s + 1) ** 2) + torch.log((s + 1).abs()), ""),
    "softmax": (lambda s, x: s.softmax(0) * x, ""),
    "sign": (lambda s, x: torch.exp(s) * x + s / 2, "without limit"),
    "no regulariser": (lambda s, x: torch.exp(-s) * x, "to zero"),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_learnt_weights_that_fall_to_zero(name: str):
    weight, words = WEIGHTS[name]
    of = of_terms(weight)
    found = failures(script(TwoTerms, loss=of, train_loop=loop(of)), "wiring")
    assert (words in found["wiring"] and "by 'log_var' alone" in found["wiring"]) if words else not found, found


def test_a_temperature_of_a_loss_may_make_it_small():
    class Scaled(TwoTerms):
        pass

    def of(model: nn.Module, batch: list) -> Tensor:
        return F.cross_entropy(model.log_var.sum().exp() * model(batch[0]), batch[1])

    assert not failures(script(Scaled, loss=of, train_loop=loop(of)), "wiring")
