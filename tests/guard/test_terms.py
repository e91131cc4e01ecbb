"""Rules of `names` about terms and rows: derivatives, terms that count twice, dropped labels, a loss on all nodes; and the sign of an actor."""

from pathlib import Path

import pytest
from trainworthy.guard.checks import names

from tests.conftest import patched
from tests.guard.guarding import guard

HEAT = """
import torch
from torch.autograd import grad

def residual(net, x, t, ones):
    u = net(x, t)
    u_t = grad(u, t, ones, create_graph=True)[0]
    u_x = grad(u, x, ones, create_graph=True)[0]
    u_xx = grad(u_x, x, ones, create_graph=True)[0]
    return u_t - u_xx

def border(net, t, left, right):
    return net(left, t).pow(2).mean() + net(right, t).pow(2).mean()

fit(residual, border)
"""
FLOW = """
import torch

def loss(net, x, y, null, p_uncond):
    drop = torch.rand(len(y)) < p_uncond
    kept = torch.where(drop, torch.full_like(y, null), y)
    return (net(x, kept) - x).square().mean()

fit(loss)
"""
GRAPH = """
import torch
from torch.nn import functional as F

def train(model, data, optimizer):
    optimizer.zero_grad()
    out = model(data.x, data.edge_index)
    F.cross_entropy(out[data.train_mask], data.y[data.train_mask]).backward()
    optimizer.step()

def test(model, data):
    answers = model(data.x, data.edge_index).argmax(1)
    return [(answers[m] == data.y[m]).float().mean() for m in (data.train_mask, data.val_mask, data.test_mask)]

print("nodes to learn from:", int(data.train_mask.sum()))
for epoch in range(9):
    train(model, data, optimizer)
    print(test(model, data))
"""
CASES = {
    "as it is": (HEAT, [], ""),
    "by another variable": (HEAT, [("grad(u_x, x", "grad(u_x, t")], "differentiating by x and t"),
    "a mixed derivative": (HEAT, [("u_xx = grad(u_x, x", "u_tx = grad(u_x, t"), ("- u_xx", "- u_tx")], ""),
    "one border twice": (HEAT, [("net(right, t)", "net(left, t)")], "adds `net(left, t).pow(2).mean()` twice"),
    "drawn anew": (HEAT, [("net(left, t).pow(2).mean() + net(right, t)", "net.sample(t).pow(2).mean() + net.sample(t)")], ""),
    "labels dropped": (FLOW, [], ""),
    "all others dropped": (FLOW, [("torch.full_like(y, null), y)", "y, torch.full_like(y, null))")], "keeps what should be dropped"),
    "a mask of what is kept": (FLOW, [("drop = torch.rand(len(y)) < p_uncond", "keep = torch.rand(len(y)) > p_uncond"),
                                      ("torch.where(drop, torch.full_like(y, null), y)", "torch.where(keep, y, torch.full_like(y, null))")], ""),
    "training nodes": (GRAPH, [], ""),
    "all nodes": (GRAPH, [("out[data.train_mask], data.y[data.train_mask]", "out, data.y")], "also those that the evaluation scores"),
    "rows that were cut before": (GRAPH, [("out[data.train_mask], data.y[data.train_mask]", "out, data.labels"),
                                          ("def train(", "def cut(data):\n    data.labels = data.y[data.train_mask]\n\n"
                                           "def train("), ("for epoch", "cut(data)\nfor epoch")], ""),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_terms_and_rows(name: str, tmp_path: Path):
    source, changes, words = CASES[name]
    (tmp_path / "train.py").write_text(patched(source, *changes))
    found = names.check(tmp_path / "train.py")
    assert found["ok"] == (not words), found
    assert words in found["measured"]


DDPG = """
import copy
import random
import gymnasium
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

random.seed(0)
torch.manual_seed(0)

class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1))
    def forward(self, states, actions):
        return self.net(torch.cat([states, actions], 1)).squeeze(1)

env = gymnasium.make("Pendulum-v1")
env.action_space.seed(0)
actor, critic = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 1), nn.Tanh()), Critic()
later_actor, later_critic = copy.deepcopy(actor), copy.deepcopy(critic)
actor_optimizer, critic_optimizer = (torch.optim.Adam(m.parameters(), 1e-3) for m in (actor, critic))
memory = []
state, _ = env.reset(seed=0)
for step in range(700):
    action = env.action_space.sample()
    following, reward, ended, cut, _ = env.step(action)
    memory.append((state, action / 2, reward, following, float(ended)))
    state = env.reset()[0] if ended or cut else following
    if step < 300:
        continue
    s, a, r, s2, d = (torch.tensor(np.array(x), dtype=torch.float32) for x in zip(*random.sample(memory, 64)))
    with torch.no_grad():
        goal = r + 0.99 * (1 - d) * later_critic(s2, later_actor(s2))
    critic_optimizer.zero_grad()
    F.mse_loss(critic(s, a), goal).backward()
    critic_optimizer.step()
    actor_optimizer.zero_grad()
    (-critic(s, actor(s)).mean()).backward()
    actor_optimizer.step()
    with torch.no_grad():
        for one, other in ((actor, later_actor), (critic, later_critic)):
            for p, q in zip(one.parameters(), other.parameters()):
                q.lerp_(p, 0.01)
"""
LOWERED = ("(-critic(s, actor(s)).mean()).backward()", "critic(s, actor(s)).mean().backward()")
COSTS = ("goal = r +", "goal = -r +")


@pytest.mark.parametrize(("changes", "stopped"), [([LOWERED], True), ([], False), ([LOWERED, COSTS], False)],
                         ids=["no minus", "as it is", "costs"])  # fmt: skip
def test_an_actor_that_lowers_the_value_of_its_actions(changes: list, stopped: bool, tmp_path: Path):
    verdicts, printed, _ = guard(patched(DDPG, *changes), tmp_path, interventions=False)
    assert (verdicts["direction"].verdict == "fail") == stopped, printed
    assert ("the minus is missing" in printed) == stopped
