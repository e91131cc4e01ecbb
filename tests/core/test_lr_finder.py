"""The range test: it finds a rate that trains, says so when there is none, and leaves no trace."""

import copy
import math

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from trainworthy.core.base.errors import UserError
from trainworthy.core.loop.lr_finder import LRFinder


@pytest.fixture(autouse=True)
def one_thread():
    """Nets this small are slower with more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Real handwritten digits: (1797, 64) in [0, 1] and labels (1797,)."""
    data = load_digits()
    return torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)


def batches(x: torch.Tensor, y: torch.Tensor, size: int = 64, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    return [(x[i], y[i]) for i in order.split(size)][:-1]


def net(seed: int = 0, *, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(dropout), nn.Linear(128, 10))


OPTIMIZERS = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-3),
    "adamw fused": lambda ps: torch.optim.AdamW(ps, lr=1e-3, fused=True),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=1e-3, momentum=0.9),
}


# ------------------------------------------------------------------------------------------------------- what it finds
def mlp(hidden: int, seed: int = 1) -> nn.Module:
    """ReLU layers without normalisation: unlike batch norm, nothing hides a rate that is too high."""
    torch.manual_seed(seed)
    layers = [layer for _ in range(hidden) for layer in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(64, 10))


@pytest.mark.parametrize(
    ("name", "lr_end", "hidden"), [("adamw", 10.0, 5), ("adamw fused", 10.0, 5), ("sgd", 100.0, 2)]
)
def test_suggestion_trains_better_than_thirty_times_less_or_more(digits, name, lr_end, hidden):
    data = batches(*digits)
    model = mlp(hidden)
    finder = LRFinder(model, OPTIMIZERS[name](model.parameters()), F.cross_entropy, "cpu")
    rate = finder.range_test(data, lr_start=1e-6, lr_end=lr_end).suggested_lr()
    assert rate is not None, finder.verdict

    def after_two_epochs(rate: float) -> float:
        fresh = mlp(hidden)
        optimizer = OPTIMIZERS[name](fresh.parameters())
        optimizer.param_groups[0]["lr"] = rate
        for x, y in data * 2:
            optimizer.zero_grad()
            F.cross_entropy(fresh(x), y).backward()
            optimizer.step()
        with torch.no_grad():
            loss = F.cross_entropy(fresh(digits[0]), digits[1]).item()
        return loss if math.isfinite(loss) else math.inf

    found, less, more = (after_two_epochs(r) for r in (rate, rate / 30, rate * 30))
    assert found < 1.0, f"at {rate:.2g} the loss is {found:.2f} after two epochs; ln 10 = 2.3 is chance"
    assert less > found + 1, f"{rate / 30:.2g} trains as well: {less:.3f}, against {found:.3f}"
    assert more > found + 1, f"{rate * 30:.2g} trains as well: {more:.3f}, against {found:.3f}"


@pytest.mark.parametrize("num_steps", [40, 100])
def test_short_tests_agree_with_the_long_one(digits, num_steps):
    data = batches(*digits)

    def suggestion(steps: int) -> float | None:
        model = net()
        return LRFinder(model, OPTIMIZERS["adamw"](model.parameters()), F.cross_entropy, "cpu").range_test(
            data, 1e-6, 1.0, steps).suggested_lr()  # fmt: skip

    assert suggestion(200) / 10 < suggestion(num_steps) < suggestion(200) * 10


def test_dict_batches_and_loader_shorter_than_the_test(digits):
    data = [{"x": x, "y": y} for x, y in batches(*digits)][:5]
    model = net()
    finder = LRFinder(
        model, OPTIMIZERS["adamw"](model.parameters()), lambda m, b: F.cross_entropy(m(b["x"]), b["y"]), "cpu"
    )
    finder.range_test(data, num_steps=60)
    assert len(finder.rates) == 60
    assert finder.suggested_lr() is not None


def test_rates_are_log_spaced_from_start_to_end(digits):
    model = net()
    finder = LRFinder(model, OPTIMIZERS["adamw"](model.parameters()), F.cross_entropy, "cpu")
    finder.range_test(batches(*digits), 1e-6, 1e-3, 31)
    assert finder.rates[0] == pytest.approx(1e-6)
    assert finder.rates[-1] == pytest.approx(1e-3)
    assert finder.rates[10] == pytest.approx(1e-5)


def test_smoothing_starts_without_bias(digits):
    model = net()
    finder = LRFinder(model, OPTIMIZERS["adamw"](model.parameters()), F.cross_entropy, "cpu").range_test(
        batches(*digits)
    )
    assert finder.smoothed[0] == pytest.approx(finder.losses[0])
    assert min(finder.losses[:5]) < finder.smoothed[4] < max(finder.losses[:5])


def test_groups_keep_their_ratio(digits):
    model = net()
    optimizer = torch.optim.AdamW([
        {"params": model[0].parameters(), "lr": 1e-4},
        {"params": [*model[1].parameters(), *model[4].parameters()], "lr": 1e-2},
    ])  # fmt: skip
    seen = []
    optimizer.register_step_pre_hook(lambda o, *_: seen.append([g["lr"] for g in o.param_groups]))
    finder = LRFinder(model, optimizer, F.cross_entropy, "cpu").range_test(batches(*digits))
    assert all(low == pytest.approx(high / 100) for low, high in seen)
    assert [high for _, high in seen] == pytest.approx(finder.rates[: len(seen)])
    assert [g["lr"] for g in optimizer.param_groups] == [1e-4, 1e-2]


def test_rate_zero_of_a_warm_up_uses_the_peak(digits):
    model = net()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 100)
    assert optimizer.param_groups[0]["lr"] == 0
    LRFinder(model, optimizer, F.cross_entropy, "cpu").range_test(batches(*digits), num_steps=20)
    assert optimizer.param_groups[0]["lr"] == 0


# ------------------------------------------------------------------------------------------------------ when it says no
def test_constant_loss_has_no_usable_rate(digits):
    model = net()
    finder = LRFinder(model, OPTIMIZERS["adamw"](model.parameters()), lambda out, y: 0 * out.sum() + 2.3, "cpu")
    assert finder.range_test(batches(*digits)).suggested_lr() is None


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_range_that_diverges_at_once_has_no_usable_rate(digits, name):
    model = net()
    finder = LRFinder(model, OPTIMIZERS[name](model.parameters()), F.cross_entropy, "cpu")
    assert finder.range_test(batches(*digits), lr_start=30.0, lr_end=1e5).suggested_lr() is None


@pytest.mark.parametrize("seed", range(5))
def test_labels_that_are_noise_have_no_usable_rate(seed):
    """Fresh coin flips, and a model that starts where the best answer is (p = 0.5): the loss moves, and means nothing."""
    g = torch.Generator().manual_seed(seed)
    data = [(torch.randn(16, 4, generator=g), torch.randint(2, (16,), generator=g)) for _ in range(200)]
    torch.manual_seed(seed)
    model = nn.Linear(4, 2)
    with torch.no_grad():
        model.weight.mul_(0.1)
        model.bias.zero_()
    finder = LRFinder(model, OPTIMIZERS["sgd"](model.parameters()), F.cross_entropy, "cpu")
    assert finder.range_test(data, lr_end=10.0).suggested_lr() is None, finder.verdict


def test_a_range_too_low_to_move_has_no_usable_rate(digits):
    model = net()
    finder = LRFinder(model, OPTIMIZERS["sgd"](model.parameters()), F.cross_entropy, "cpu")
    assert finder.range_test(batches(*digits), lr_start=1e-12, lr_end=1e-9).suggested_lr() is None


def test_a_loss_that_is_nan_from_the_start_has_no_usable_rate(digits, tmp_path):
    model = net()
    finder = LRFinder(model, OPTIMIZERS["adamw"](model.parameters()), lambda out, y: out.sum() * float("nan"), "cpu")
    assert finder.range_test(batches(*digits)).suggested_lr() is None
    assert finder.rates == []
    finder.plot(tmp_path / "nan.png")


# -------------------------------------------------------------------------------------------------------- when it stops
def test_it_stops_when_the_loss_blows_up(digits):
    model = net()
    finder = LRFinder(model, OPTIMIZERS["sgd"](model.parameters()), F.cross_entropy, "cpu")
    finder.range_test(batches(*digits), lr_start=1e-5, lr_end=1e6)
    assert len(finder.rates) < 200
    assert finder.smoothed[-1] > 4 * min(finder.smoothed)
    assert finder.suggested_lr() is not None, "the fall before the blow-up counts"


def test_a_loss_below_zero_does_not_stop_it():
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    data = [torch.randn(32, 4) for _ in range(20)]
    finder = LRFinder(model, OPTIMIZERS["sgd"](model.parameters()), lambda m, b: m(b).pow(2).mean() - 50, "cpu")
    finder.range_test(data, lr_end=1e-2)
    assert len(finder.rates) == 200


def test_it_stops_at_a_loss_that_is_not_finite(digits):
    model, calls = net(), []

    def loss(out, y):
        calls.append(1)
        return F.cross_entropy(out, y) * (float("inf") if len(calls) == 30 else 1)

    finder = LRFinder(model, OPTIMIZERS["adamw"](model.parameters()), loss, "cpu").range_test(batches(*digits))
    assert len(calls) == 30
    assert len(finder.losses) == 29


# ---------------------------------------------------------------------------------------------------- what it leaves behind
class Watched(nn.Module):
    """Batch norm, dropout, a buffer outside state_dict, a frozen part in eval mode."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)).requires_grad_(False)
        self.net = net(dropout=0.3)
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x):
        self.seen += 1
        return self.net(self.frozen(x))


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    return copy.deepcopy({
        "weights": dict(model.named_parameters()),
        "buffers": dict(model.named_buffers()),
        "gradients": {n: p.grad for n, p in model.named_parameters()},
        "modes": [m.training for m in model.modules()],
        "optimizer": optimizer.state_dict(),
        "random": [torch.get_rng_state()],
    })  # fmt: skip


def assert_same(a, b, where: str = "") -> None:
    """Bit by bit, and the same type, all the way down."""
    assert type(a) is type(b), where
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for k in a:
            assert_same(a[k], b[k], f"{where}/{k}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}/{i}")
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b), where
    else:
        assert a == b, where


@pytest.mark.parametrize("trained", [0, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_everything_is_put_back(digits, name, trained, mode):
    data = batches(*digits)
    model = Watched()
    getattr(model, mode)()
    model.frozen.eval()
    optimizer = OPTIMIZERS[name]([p for p in model.parameters() if p.requires_grad])
    for x, y in data[:trained]:  # the optimizer then has moments, the parameters gradients
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    before = everything(model, optimizer)
    groups = [id(g) for g in optimizer.param_groups]
    moved = []
    optimizer.register_step_post_hook(lambda *_: moved.append(model.net[0].weight.sum().item()))
    loader = torch.utils.data.DataLoader(list(zip(*digits, strict=True)), batch_size=64, shuffle=True)  # it draws, too
    LRFinder(model, optimizer, F.cross_entropy, "cpu").range_test(loader, lr_end=1e3)
    assert len(set(moved)) > 10, "the test did train"
    assert_same(before, everything(model, optimizer))
    assert [id(g) for g in optimizer.param_groups] == groups, (
        "a scheduler that holds a group must still hold the right one"
    )


def test_put_back_after_an_error_too(digits):
    model = net()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    before = everything(model, optimizer)
    once = iter(batches(*digits)[:15])
    with pytest.raises(UserError, match="no batch a second time"):
        LRFinder(model, optimizer, F.cross_entropy, "cpu").range_test(once)
    assert_same(before, everything(model, optimizer))


# ------------------------------------------------------------------------------------------------------ pictures, errors
def test_plot_marks_the_suggestion_or_says_there_is_none(digits, tmp_path):
    model = net()
    finder = LRFinder(model, OPTIMIZERS["adamw"](model.parameters()), F.cross_entropy, "cpu").range_test(
        batches(*digits)
    )
    found = finder.plot(tmp_path / "new" / "found.svg").read_text()
    assert found.startswith("<?xml")
    assert "suggestion" in found
    flat = LRFinder(model, finder.optimizer, lambda out, y: 0 * out.sum(), "cpu").range_test(batches(*digits))
    assert "no usable rate" in flat.plot(tmp_path / "flat.svg").read_text()
    assert flat.plot(tmp_path / "flat.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"lr_start": 1e-2, "lr_end": 1e-3}, "lr_start < lr_end"),
        ({"lr_start": 0.0}, "0 < lr_start"),
        ({"num_steps": 9}, "10 or more"),
    ],
)
def test_bad_arguments_are_named(digits, kwargs, says):
    model = net()
    with pytest.raises(UserError, match=says):
        LRFinder(model, OPTIMIZERS["sgd"](model.parameters()), F.cross_entropy, "cpu").range_test(
            batches(*digits), **kwargs
        )


def test_other_misuse_is_named(digits):
    model = net()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    with pytest.raises(UserError, match="gives no batch"):
        LRFinder(model, optimizer, F.cross_entropy, "cpu").range_test([])
    with pytest.raises(UserError, match="range_test"):
        LRFinder(model, optimizer, F.cross_entropy, "cpu").suggested_lr()
    per_sample = nn.CrossEntropyLoss(reduction="none")
    with pytest.raises(UserError, match="one number per batch"):
        LRFinder(model, optimizer, per_sample, "cpu").range_test(batches(*digits))
    with pytest.raises(UserError, match="rate 0"):
        LRFinder(model, torch.optim.SGD(model.parameters(), lr=0.0), F.cross_entropy, "cpu").range_test(
            batches(*digits)
        )
