"""What the guard concludes from losses, gradients and rewards: healthy formulas pass, and each wrong one is told apart."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from trainworthy.core.base.correlation import pearson
from trainworthy.guard.checks import objectives
from trainworthy.guard.measures.control import policy_rewards
from trainworthy.guard.measures.data import token_streams
from trainworthy.guard.measures.losses import variational
from trainworthy.guard.measures.losses.mixing import Mixing, compare
from trainworthy.guard.measures.losses.penalties import Penalties, penalty
from trainworthy.guard.measures.losses.regression import Regression
from trainworthy.guard.observing.evidence import Evidence

S = torch.linspace(0.02, 0.98, 64)[torch.randperm(64, generator=torch.Generator().manual_seed(0))]
NOISES = {
    "variance-preserving": (S.sqrt(), (1 - S).sqrt(), ""),
    "scaled-sample": (0.5 * S.sqrt(), (1 - S).sqrt(), ""),
    "variance-exploding": (torch.ones(64), 30 * S, ""),
    "linear": (1 - S, S, ""),
    "karras": (1 / (S**2 + 0.25).sqrt(), S / (S**2 + 0.25).sqrt(), ""),
    "noise-without-root": (S.sqrt(), 1 - S, "coefficient of the noise"),
    "sample-without-root": (S, (1 - S).sqrt(), "coefficient of the sample"),
}


def noised(a: torch.Tensor, b: torch.Tensor, time: torch.Tensor, *, calls: int = 1) -> dict:
    """The verdict on a net that gets a * clean + b * noise and the time."""
    torch.manual_seed(0)
    seen = SimpleNamespace(evidence=Evidence())
    for _ in range(calls):
        clean, noise = torch.rand(64, 32), torch.randn(64, 32)
        given = a[:, None] * (2 * clean - 1) + b[:, None] * noise
        prediction = torch.zeros_like(noise, requires_grad=True)
        order = torch.randperm(64) if time is None else time
        seen.evidence.regression.add(prediction, noise, (None, (given, order), {}), [[clean]])
    return objectives.noise(seen)


@pytest.mark.parametrize("name", NOISES)
def test_noise_schedules(name: str):
    a, b, words = NOISES[name]
    found = noised(a, b, b.argsort().argsort())
    assert found["ok"] == (not words), found
    assert words in found["cause"]


def test_time_that_has_nothing_to_do_with_the_noise():
    found = noised(S.sqrt(), (1 - S).sqrt(), None, calls=6)
    assert "drawn twice" in found["cause"], found


def test_a_target_that_is_a_column_of_the_input():
    torch.manual_seed(0)
    for leaks in (True, False):
        one = Regression()
        for _ in range(4):
            x = torch.randn(32, 5)
            target = x[:, 3] if leaks else 2 * x[:, 3] + 1
            one.add(torch.zeros(32, requires_grad=True), target, (None, (x,), {}), [])
        found = objectives.copied(SimpleNamespace(evidence=SimpleNamespace(regression=one), control=None))
        assert (found is not None and "entry 3" in found[0]) == leaks


@pytest.mark.parametrize(
    ("past", "target", "leaks"),
    [
        (slice(0, 8), slice(7, 11), True),
        (slice(0, 8), slice(8, 12), False),
        (slice(0, 8), slice(1, 9), False),  # at each step the next one
        (slice(0, 8), slice(0, 8), False),  # reconstructed
        (slice(7, 8), slice(7, 12), False),  # a trajectory from its first state
    ],
)
@pytest.mark.parametrize("columns", [1, 6])
def test_a_window_that_begins_with_the_last_value_of_its_input(past: slice, target: slice, leaks: bool, columns: int):
    torch.manual_seed(0)
    for several in (False, True):
        one = Regression()
        for _ in range(4):
            x = torch.randn(32, 12, columns)
            goal = x[:, target] if several else x[:, target, 0]
            one.add(torch.zeros(goal.shape, requires_grad=True), goal, (None, (x[:, past],), {}), [])
        found = objectives.copied(SimpleNamespace(evidence=SimpleNamespace(regression=one), control=None))
        assert (found is not None) == leaks
        reverse = Regression()
        reverse.add(torch.zeros(32, 12, requires_grad=True), x[:, :, 0].flip(1), (None, (x,), {}), [])
        assert not reverse.leaks


@pytest.mark.parametrize("kind", ["right", "exchanged", "foreign"])
def test_mixed_targets(kind: str):
    torch.manual_seed(0)
    x, y = torch.rand(16, 1, 4, 4), torch.arange(16) % 5
    soft, order, lam = torch.nn.functional.one_hot(y, 5).float(), torch.arange(16).roll(3), 0.3
    mixed = lam * x + (1 - lam) * x[order]
    share = 1 - lam if kind == "exchanged" else lam
    goal = share * soft + (1 - share) * soft[order.roll(1) if kind == "foreign" else order]
    assert compare(goal, mixed, [x, y]) == kind
    assert compare(goal, mixed, [x.roll(1, 0) + 1, y]) == ""


@pytest.mark.parametrize("exchanged", [False, True])
def test_mixed_losses(exchanged: bool):
    """lam * cross_entropy(out, a) + (1 - lam) * cross_entropy(out, b), as mixup's authors write it."""
    torch.manual_seed(0)
    one, cross_entropy = Mixing(), torch.nn.functional.cross_entropy
    for _ in range(3):
        x, y, order, lam = torch.rand(16, 4), torch.arange(16) % 5, torch.randperm(16), 0.2
        mixed = lam * x + (1 - lam) * x[order]
        out = torch.randn(16, 5, requires_grad=True)
        terms = []
        for target in (y, y[order]):
            terms.append(cross_entropy(out, target))
            one.term(out, target, terms[-1], mixed, [[x, y]])
        share = 1 - lam if exchanged else lam
        (share * terms[0] + (1 - share) * terms[1]).backward()
    assert (one.right, one.exchanged, one.foreign) == ((0, 3, 0) if exchanged else (3, 0, 0))


@pytest.mark.parametrize(("form", "found"), [
    (lambda m, s: 0.5 * (m**2 + s.exp() - s - 1), "log-variance"),
    (lambda m, s: 0.5 * (m**2 + (2 * s).exp() - 2 * s - 1), "log-deviation"),
    (lambda m, s: 0.5 * (m**2 + s - s), "free"),
    (lambda m, s: 0.5 * (m**2 - s), "one-sided"),
    (lambda m, s: (m.abs() + s.abs()), ""),
])  # fmt: skip
def test_divergence_from_a_normal_code(form, found: str):
    torch.manual_seed(0)
    mean, spread = torch.randn(8, 4, requires_grad=True), torch.randn(8, 4, requires_grad=True)
    grads = torch.autograd.grad(3 * form(mean, spread).sum(), [mean, spread])
    assert variational.compare(mean.detach(), spread.detach(), *grads) == found


def test_a_look_at_a_variational_loss_leaves_its_gradients_alone():
    torch.manual_seed(0)
    body, head, x = torch.nn.Linear(12, 16), torch.nn.Linear(8, 100), torch.rand(16, 100)
    for reduction, half, found in (("sum", 0.5, "log-variance"), ("mean", 0.5, "averaged"), ("sum", 1, "wider")):
        mean, spread = body(x[:, :12]).chunk(2, 1)
        made = torch.sigmoid(head(mean + (half * spread).exp() * torch.randn_like(mean)))
        kl = 0.5 * (mean**2 + spread.exp() - spread - 1).sum()
        loss = torch.nn.functional.binary_cross_entropy(made, x, reduction=reduction) + kl
        expected = torch.autograd.grad(loss, body.weight, retain_graph=True)[0]
        one = variational.Latent()
        one.root((made, mean, spread))
        one.look(loss)
        loss.backward()
        assert one.found == [found]
        assert torch.equal(body.weight.grad, expected)
        body.zero_grad()


@pytest.mark.parametrize("seed", range(20))
def test_the_size_of_a_code_s_noise(seed: int):
    """The KL term says what the spread is; the reconstruction, how it is used."""
    torch.manual_seed(seed)
    mean, spread = torch.randn(32, 8), 0.3 * torch.randn(32, 8)
    used = {
        "log-variance": lambda s: (s / 2).exp(),
        "log-deviation": torch.exp,
        "deviation": lambda s: s,
        "variance": torch.sqrt,
    }
    decoder = torch.nn.Sequential(torch.nn.Linear(8, 20), torch.nn.Tanh(), torch.nn.Linear(20, 30))
    for form, deviation in used.items():
        s = (spread.exp() if "log" not in form else spread).requires_grad_()
        m = mean.clone().requires_grad_()
        for factor, wide in ((1, False), (2, True)):
            made = decoder(m + factor * deviation(s) * torch.randn_like(m))
            grads = torch.autograd.grad((made - 1).pow(2).sum(), [m, s])
            assert variational.unusual(*grads, spread=s, form=form) == ("wider" if wide else "")
        made = decoder(m + deviation(s) * torch.rand_like(m))
        grads = torch.autograd.grad((made - 1).pow(2).sum(), [m, s])
        assert variational.unusual(*grads, spread=s, form=form) == "one sign"
        drawn = [decoder(m + deviation(s) * torch.randn_like(m)) for _ in range(4)]
        grads = torch.autograd.grad(sum((made - 1).pow(2).sum() for made in drawn), [m, s])
        assert not variational.unusual(*grads, spread=s, form=form)


def played(weigh) -> tuple[tuple[str, str] | None, str]:
    """The verdict on a policy whose 512 actions are weighed by `weigh(rewards that follow)` of each of four environments."""
    one, draw = policy_rewards.Credit(), np.random.default_rng(0)
    for _ in range(128):
        one.seen(
            7,
            (
                draw.normal(size=(4, 3)).astype("float32"),
                draw.random(4) < 0.3,
                draw.random(4) < 0.05,
                np.zeros(4, bool),
                {},
            ),
        )
    rows = [((7, t, e), w) for e in range(4) for t, w in enumerate(weigh(np.array(one.to_go(7, 0, 128, e))))]
    one.batches = [(512, rows[i::4]) for i in range(4)]
    return policy_rewards.check(one)


def test_credit_of_actions():
    assert played(lambda g: g)[0] is None
    assert played(lambda g: g - g.mean() + np.random.default_rng(1).normal(size=128))[0] is None
    assert played(lambda g: np.random.default_rng(2).normal(size=128))[0] is None
    assert "wrong sign" in played(lambda g: -g)[0][1]
    assert "reversed time" in played(lambda g: g[::-1])[0][1]


@pytest.mark.parametrize(("decay", "forward"), [(0.95, True), (1.0, True), (0.95, False), (1.0, False)])
def test_returns_that_are_summed_from_the_first_step(decay: float, forward: bool):
    one, draw = policy_rewards.Credit(), np.random.default_rng(0)
    ends = [bool(draw.random() < 0.05) for _ in range(300)]
    for end in ends:
        one.seen(7, (draw.normal(size=3).astype("float32"), 1.0, end, False, {}))
    total, sums = 0.0, []
    for end in ends if forward else reversed(ends):
        total = 1.0 + decay * total * (not end)
        sums.append(total)
    weights = sums if forward else sums[::-1]
    one.batches = [(300, [((7, t, 0), w + draw.normal()) for t, w in enumerate(weights)])]
    fault = policy_rewards.check(one)[0]
    assert (fault is not None and "up to the action" in fault[0]) == forward, fault


def test_signs_of_gradients():
    assert objectives.sign([1.0] * 6) == 1
    assert objectives.sign([-0.9] * 6) == -1
    assert objectives.sign([1.0, -1.0] * 3) == objectives.sign([0.1] * 6) == objectives.sign([1.0] * 3) == 0
    assert math.isclose(pearson([1.0, 2.0], [1.0, 1.0]), 0.0)


def read(rows: torch.Tensor) -> tuple[str, str] | None:
    """The verdict on a text in batches of eight rows with twelve tokens each."""
    seen = SimpleNamespace(evidence=Evidence())
    for i in range(0, rows.shape[1] - 12, 12):
        seen.evidence.read(rows[:, i : i + 12], rows[:, i + 1 : i + 13].flatten())
    return token_streams.fault(seen.evidence.texts)


def test_direction_of_a_text():
    draw = torch.Generator().manual_seed(0)
    words, text = torch.randint(0, 400, (400, 3), generator=draw), [0]
    for choice in torch.randint(0, 3, (4000,), generator=draw).tolist():
        text.append(int(words[text[-1], choice]))
    ids = torch.tensor(text[:4000])
    assert read(ids.view(8, -1)) is None
    assert "view(batch_size, -1)" in read(ids.view(-1, 8).t().contiguous())[1]
    keys = torch.stack([torch.arange(250).repeat(8), torch.randint(0, 10**6, (2000,), generator=draw)], 1)
    assert read(keys.flatten().view(8, -1)) is None, "rows of one form, with keys and values"
    assert read(torch.randint(0, 50, (8, 500), generator=draw)) is None


def penalised(form) -> Penalties:
    """What is noted of ten steps of a critic whose loss has a penalty on its gradient (32, 6)."""
    torch.manual_seed(0)
    one, critic = Penalties(), torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    for _ in range(10):
        x = torch.randn(32, 6, requires_grad=True)
        found = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
        one.gradient(found)
        (10 * form(found[0]) + critic(x).mean()).backward()
    return one


@pytest.mark.parametrize("form", [lambda g: ((g.norm(2, dim=1) - 1) ** 2).mean(), lambda g: g.pow(2).sum(1).mean()])
def test_penalties_of_each_sample_are_healthy(form):
    one = penalised(form)
    assert len(one.rows) == 10
    assert penalty(one) is None


def test_penalty_along_the_batch():
    assert "norm(dim=0)" in penalty(penalised(lambda g: ((g.norm(2, dim=0) - 1) ** 2).mean()))[1]
    assert (
        penalty(penalised(lambda g: (g.pow(2) * torch.arange(1.0, 7.0)).mean())) is None
    )  # an energy with other weights


def test_penalty_of_the_whole_batch():
    """The derivative of 10 (|G| - 1)^2 is 20 (1 - 1 / |G|) G; of 10 |G|^2 it is 20 G."""
    one = Penalties()
    one.rows = [(20 * (1 - 1 / norm), 0.0, norm) for norm in (2.0, 2.1, 1.9, 1.8, 1.7, 2.3, 1.0001)]
    assert "norm() without dim" in penalty(one)[1]
    one.rows = [(20.0, 0.0, norm) for norm in (2.0, 2.1, 1.9, 1.8, 1.7, 2.3)]
    assert penalty(one) is None
