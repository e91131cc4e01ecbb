"""Targets of a Q-net with and without the mask of ended episodes."""

import pytest

from tests.conftest import patched
from tests.guard.guarding import guard
from tests.helpers.sampling import sample

DQN = """
import random
import gymnasium
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

random.seed(0)
torch.manual_seed(0)
LIMIT = None
env = gymnasium.make("CartPole-v1")
net, target_net = (nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2)) for _ in range(2))
target_net.load_state_dict(net.state_dict())
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
memory = []
for episode in range(400):
    state, _ = env.reset(seed=episode)
    done, steps = False, 0
    while not done:
        action = random.randrange(2)
        following, reward, ended, cut, _ = env.step(action)
        done, steps = ended or cut, steps + 1
        memory.append((state, action, reward, following, float(ended)))
        state = following
    for _ in range(4 if len(memory) > 200 else 0):
        s, a, r, s2, d = zip(*random.sample(memory, 64))
        s, s2 = torch.tensor(np.array(s)), torch.tensor(np.array(s2))
        a, r, d = torch.tensor(a), torch.tensor(r), torch.tensor(d, dtype=torch.float32)
        q = net(s).gather(1, a[:, None]).squeeze(1)
        with torch.no_grad():
            value = target_net(s2).max(1).values
            goal = r + 0.99 * value * (1 - d)
        loss = F.mse_loss(q, goal.float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if episode % 10 == 0:
        target_net.load_state_dict(net.state_dict())
"""
VALUE = "value = target_net(s2).max(1).values"
DOUBLE = (VALUE, "value = target_net(s2).gather(1, net(s2).argmax(1, keepdim=True)).squeeze(1)")
OPEN = (" * (1 - d)", "")
SHAPED = (
    "append((state, action, reward,",
    "append((state, action, reward - abs(float(following[0])) - 2 * abs(float(following[2])),",
)
MINUS = ("append((state, action, reward,", "append((state, action, -1.0 if ended else 0.1,")
CASES = {"no mask": ([OPEN], True), "no mask, double": ([DOUBLE, OPEN], True), "mask": ([], False), "double": ([DOUBLE], False),
         "shaped reward": ([SHAPED], False), "minus one at the end": ([MINUS], False)}  # fmt: skip


@pytest.mark.parametrize("name", sample(CASES, "no mask, double", "minus one at the end"))
def test_values_after_the_end(name: str, tmp_path):
    changes, stopped = CASES[name]
    verdicts, printed, _ = guard(patched(DQN, *changes), tmp_path, interventions=False)
    assert (verdicts["direction"].verdict == "fail") == stopped, printed
    assert ("the mask of ended episodes is missing" in printed) == stopped
    assert "the observer failed" not in printed


def test_a_time_limit_that_ends_all_episodes_is_no_end(tmp_path):
    """An environment of one's own may call its time limit an end; a script that knows better is healthy."""
    limited = patched(DQN, OPEN, ('env = gymnasium.make("CartPole-v1")', LIMITED))
    verdicts, printed, _ = guard(limited, tmp_path, interventions=False)
    assert verdicts["direction"].verdict != "fail", printed


LIMITED = """
class Limited(gymnasium.Wrapper):
    def reset(self, **given):
        self.left = 8
        return self.env.reset(**given)

    def step(self, action):
        self.left -= 1
        state, reward, ended, cut, info = self.env.step(action)
        return state, reward, ended or not self.left, cut, info

env = Limited(gymnasium.make("CartPole-v1").unwrapped)
"""


POLICY = """
import gymnasium
import numpy as np
import torch
from torch import nn

torch.manual_seed(0)
env = gymnasium.make("CartPole-v1")

class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
    def forward(self, states, actions):
        return torch.distributions.Categorical(logits=self.net(states)).log_prob(actions)

policy = Policy()
value = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
optimizers = [torch.optim.Adam(m.parameters(), lr=3e-3) for m in (policy, value)]
for epoch in range(12):
    rows, returns = [], []
    while len(rows) < 256:
        state, done, rewards = env.reset(seed=len(rows))[0], False, []
        while not done:
            with torch.no_grad():
                logp = policy.net(torch.as_tensor(state)[None])[0].log_softmax(0)
            action = int(torch.multinomial(logp.exp(), 1))
            rows.append((state, action, float(logp[action])))
            state, reward, ended, cut, _ = env.step(action)
            done = ended or cut
            rewards.append(reward)
        returns += np.cumsum(rewards[::-1])[::-1].tolist()
    s = torch.tensor(np.array([r[0] for r in rows]))
    a, old = torch.tensor([r[1] for r in rows]), torch.tensor([r[2] for r in rows])
    goal = torch.tensor(returns, dtype=torch.float32)
    for _ in range(4):
        policy(s, a)
        logp = policy(s, a)
        better = goal - value(s).detach().squeeze(1)
        moved = (old - logp).mean().item()
        optimizers[0].zero_grad()
        (-logp * (better - better.mean()) / better.std()).mean().backward()
        optimizers[0].step()
        optimizers[1].zero_grad()
        ((value(s).squeeze(1) - goal) ** 2).mean().backward()
        optimizers[1].step()
    print(epoch, goal.mean().item(), moved)
"""


def test_an_old_log_probability_is_no_target(tmp_path):
    """Of a policy that returns log-probabilities, as Spinning Up has: they were taken for the values of next states, and the old ones for targets."""
    verdicts, printed, _ = guard(POLICY, tmp_path, interventions=False)
    assert verdicts["direction"].verdict != "fail", printed
