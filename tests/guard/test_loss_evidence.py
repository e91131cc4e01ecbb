"""Losses of several labels, logarithms as scales, advantages over the end of an episode: each is stopped, its healthy twin and what looks like
it are not."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from trainworthy.guard.measures.control.advantages import Sums, Values
from trainworthy.guard.measures.control.policy_rewards import Credit
from trainworthy.guard.measures.losses import targets
from trainworthy.guard.measures.losses.log_scales import LogScales
from trainworthy.guard.measures.losses.multi_hot import MultiHot

from tests.conftest import patched
from tests.guard.guarding import guard

LABELS = """
import torch
from torch import nn
torch.manual_seed(SEED)
x, w = torch.randn(800, 16), torch.randn(16, 6)
y = (x @ w > SHIFT).float()
train = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x[:600], y[:600]), 32, shuffle=True)
val = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x[600:], y[600:]), 100)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 6))
criterion = nn.LOSS()
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
for epoch in range(3):
    model.train()
    for a, b in train:
        optimizer.zero_grad()
        criterion(model(a), b).backward()
        optimizer.step()
    model.eval()
    right = 0
    with torch.no_grad():
        for a, b in val:
            p = torch.sigmoid(model(a))
            right += ((p > 0.5) == (b > 0.5)).float().mean().item() * len(a)
    print("accuracy", right / 200)
"""


@pytest.mark.parametrize(("loss", "shift", "stopped"), [
    ("CrossEntropyLoss", "4.0", True), ("CrossEntropyLoss", "-4.0", True), ("BCEWithLogitsLoss", "4.0", False)
])  # fmt: skip
def test_cross_entropy_on_several_labels(loss, shift, stopped, tmp_path):
    text = LABELS.replace("LOSS", loss).replace("SHIFT", shift).replace("SEED", "0")
    verdicts, output, _ = guard(text, tmp_path, interventions=False, **{"--only": "targets"})
    assert verdicts["targets"].blocks == stopped, output
    assert not stopped or "do not exclude each other" in output


@pytest.mark.parametrize(
    ("call", "stopped"),
    [
        ("F.binary_cross_entropy_with_logits(b, model(a))", True),
        ("F.binary_cross_entropy(b, 0.1 + 0.8 * torch.sigmoid(model(a)).nan_to_num())", True),
        ("F.binary_cross_entropy_with_logits(model(a), b)", False),
        ("F.binary_cross_entropy_with_logits(model(a), torch.sigmoid(b + bias))", False),
        ("F.mse_loss(b, torch.sigmoid(model(a)))", False),
        ("F.kl_div(b, F.log_softmax(model(a), 1), log_target=True)", False),
    ],
)
def test_a_target_in_place_of_the_prediction(call, stopped, tmp_path):
    """Learned targets and divergences in the other direction are meant."""
    source = patched(
        LABELS.replace("SEED", "0").replace("SHIFT", "0").replace("LOSS", "BCEWithLogitsLoss"),
        ("criterion(model(a), b).backward()", f"({call}).backward()"),
        ("from torch import nn\n", "from torch import nn\nimport torch.nn.functional as F\n"),
        ("optimizer = torch.optim.Adam(model.parameters(), 1e-2)",
         "bias = nn.Parameter(torch.zeros(6))\noptimizer = torch.optim.Adam([*model.parameters(), bias], 1e-2)"),
    )  # fmt: skip
    verdicts, printed, _ = guard(source, tmp_path, interventions=False, **{"--only": "loss-input"})
    assert verdicts["loss-input"].blocks == stopped, printed


@pytest.mark.parametrize("kind", ["counts", "smooth", "one-hot", "ignored", "bag"])
def test_soft_targets_that_are_meant(kind: str):
    one, draw = MultiHot(), torch.Generator().manual_seed(0)
    for _ in range(10):
        hot = F.one_hot(torch.randint(6, (32,), generator=draw), 6).float()
        if kind == "counts":
            hot = torch.poisson(torch.ones(32, 6), generator=draw)
        if kind == "smooth":
            hot = 0.9 * hot + 0.1 / 6
        if kind == "ignored":
            hot[:8] = 0
        if kind == "bag":  # the items of a user: several, never none, and no sigmoid
            hot = (torch.rand(32, 6, generator=draw) < 0.5).float()
            hot[:, 0] = 1
        one.target(hot)
    assert one.fault() is None


class Scaled(nn.Module):
    def __init__(self, first: float, how: str):
        super().__init__()
        self.a, self.b, self.how = nn.Linear(8, 4), nn.Linear(8, 4), how
        self.logit_scale = nn.Parameter(torch.tensor(first))

    def forward(self, x):
        a, b = (F.normalize(f(x), dim=-1) for f in (self.a, self.b))
        scale = self.logit_scale
        if self.how == "clamped":
            scale = scale.clamp(max=np.log(100)).exp()
        elif self.how == "exp":
            scale = scale.exp()
        return scale * a @ b.t()


@pytest.mark.parametrize(("first", "how", "stopped"), [
    (np.log(1 / 0.07), "plain", True), (np.log(20.0), "plain", True), (np.log(0.1), "plain", True),
    (np.log(1 / 0.07), "exp", False), (np.log(1 / 0.07), "clamped", False), (10.0, "plain", False), (1 / 0.07, "plain", False),
    (0.0, "plain", False), (1.0, "plain", False), (2.6, "plain", False),
])  # fmt: skip
def test_a_scale_that_is_a_logarithm(first: float, how: str, stopped: bool):
    for seed in range(5):
        torch.manual_seed(seed)
        one, net = LogScales(), Scaled(float(first), how)
        one.look(F.cross_entropy(net(torch.randn(16, 8)), torch.arange(16)))
        assert (one.fault({}) is not None) == stopped


def rollouts(
    *, masked: bool, critic: bool = True, seed: int = 0, horizon: int = 64, envs: int = 4, returns: bool = False
):
    """The record of three rollouts of an environment whose episodes end now and then."""
    rng, credit, values = np.random.default_rng(seed), Credit(), Values()
    states = rng.normal(size=(3 * horizon + 1, envs, 3)).astype(np.float32)
    credit.seen(1, (states[0], {}))
    reward, over = rng.normal(size=(3 * horizon, envs)), rng.random((3 * horizon, envs)) < 0.08
    net = nn.Linear(3, 1)
    for u in range(3):
        v = []
        for t in range(u * horizon, (u + 1) * horizon):
            x = torch.tensor(states[t])
            out = (x[:, :2], net(x)) if critic else (x[:, :2],)
            values.root(net, x, out, credit)
            v.append(out[-1].detach().flatten().numpy() if critic else np.zeros(envs))
            credit.seen(1, (states[t + 1], reward[t], over[t], np.zeros(envs, bool), {}))
        x = torch.tensor(states[(u + 1) * horizon])
        last = net(x).detach().flatten().numpy() if critic else np.zeros(envs)
        values.root(net, x, (x[:, :2], net(x)), credit)
        advantage, running, following = np.zeros((horizon, envs)), np.zeros(envs), last
        for i in reversed(range(horizon)):
            t = u * horizon + i
            on = 1.0 - over[t] * masked
            running = reward[t] + 0.99 * following * on - v[i] + 0.99 * (1.0 if returns else 0.95) * on * running
            advantage[i], following = running, v[i]
        weights = (advantage - advantage.mean()) / advantage.std() / 100
        rows = [((1, u * horizon + i, k), float(weights[i, k])) for i in range(horizon) for k in range(envs)]
        credit.batches += [(credit.count, rows[i : i + envs]) for i in range(0, len(rows), envs)]
        credit.known |= {place for place, _ in rows}
    return Sums(credit, values)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("critic", "returns"), [(True, False), (True, True), (False, True)])
def test_advantages_that_run_over_the_end_of_an_episode(seed: int, critic: bool, returns: bool):
    torch.manual_seed(seed)
    wrong, right = (rollouts(masked=m, critic=critic, seed=seed, returns=returns) for m in (False, True))
    assert wrong.on >= 20
    assert not wrong.masked
    assert right.exact == wrong.exact > 100
    assert not right.on
    assert right.masked >= 20
    assert bool(wrong.based) == critic


@pytest.mark.parametrize(("axis", "wrong"), [(0, True), (1, False)])
@pytest.mark.parametrize("name", ["nll_loss", "kl_div"])
def test_logarithms_of_probabilities_that_sum_to_one_over_the_batch(name: str, axis: int, wrong: bool):
    scores = torch.randn(8, 5, generator=torch.Generator().manual_seed(0)).log_softmax(axis)
    target = scores.exp() if name == "kl_div" else torch.arange(8) % 5
    assert targets.describe(name, scores, target, {}, None)["over_batch"] is wrong
