"""DQN on a grid of its own, too few steps to learn it: greedy returns of the first nets are worse than those of a random one."""

import random
from collections import deque

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

random.seed(0), torch.manual_seed(0)
MOVES = ((0, 1), (1, 0), (0, -1), (-1, 0))


class Grid:
    """A goal in the corner of 7 x 7 fields, and a cliff in the way."""

    def reset(self):
        self.at, self.time = (0, 0), 0
        return self.seen()

    def seen(self):
        out = np.zeros(49, dtype=np.float32)
        out[self.at[0] * 7 + self.at[1]] = 1
        return out

    def step(self, action):
        self.time += 1
        self.at = tuple(min(6, max(0, a + b)) for a, b in zip(self.at, MOVES[action], strict=True))
        if self.at in ((3, 3), (2, 4), (4, 2)):
            return self.seen(), -10.0, True
        if self.at == (6, 6):
            return self.seen(), 10.0, True
        return self.seen(), -0.1, self.time >= 60


def greedy(net, episodes=5):
    env, total = Grid(), 0.0
    for _ in range(episodes):
        state, done = env.reset(), False
        while not done:
            with torch.no_grad():
                action = int(net(torch.from_numpy(state)).argmax()) if random.random() > 0.05 else random.randrange(4)
            state, reward, done = env.step(action)
            total += reward
    return total / episodes


net, target = (nn.Sequential(nn.Linear(49, 64), nn.ReLU(), nn.Linear(64, 4)) for _ in range(2))
target.load_state_dict(net.state_dict())
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
memory, env = deque(maxlen=5000), Grid()
state = env.reset()
for t in range(6000):
    epsilon = max(0.1, 1 - t / 4000)
    with torch.no_grad():
        action = random.randrange(4) if random.random() < epsilon else int(net(torch.from_numpy(state)).argmax())
    after, reward, done = env.step(action)
    memory.append((state, action, reward, after, float(done)))
    state = env.reset() if done else after
    if len(memory) >= 200 and t % 2 == 0:
        s, a, r, n, d = zip(*random.sample(memory, 32), strict=True)
        with torch.no_grad():
            aim = torch.tensor(r) + 0.97 * (1 - torch.tensor(d)) * target(torch.from_numpy(np.array(n))).max(1).values
        value = net(torch.from_numpy(np.array(s))).gather(1, torch.tensor(a)[:, None]).squeeze(1)
        loss = F.smooth_l1_loss(value, aim)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if t % 400 == 0:
        target.load_state_dict(net.state_dict())
    if (t + 1) % 500 == 0:
        print(f"step {t + 1} epsilon {epsilon:.2f} eval reward {greedy(net):.2f}")
