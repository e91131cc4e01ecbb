"""REINFORCE on an environment of its own: a corridor with a goal at one end, episodes in batches."""

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

torch.manual_seed(0)
rng = np.random.default_rng(0)


class Corridors:
    """Many corridors of 9 fields at once; the goal may be left or right, 12 moves are allowed."""

    def __init__(self, n):
        self.n = n

    def reset(self):
        self.place = np.full(self.n, 4)
        self.goal = rng.choice([0, 8], self.n)
        self.left = np.ones(self.n, dtype=bool)
        return self.view()

    def view(self):
        return torch.tensor(np.stack([self.place / 8 - 0.5, self.goal / 8 - 0.5], 1), dtype=torch.float32)

    def move(self, action):
        self.place = np.where(self.left, np.clip(self.place + np.where(action == 1, 1, -1), 0, 8), self.place)
        reached = self.left & (self.place == self.goal)
        gain = np.where(reached, 1.0, np.where(self.left, -0.02, 0.0))
        self.left &= ~reached
        return self.view(), gain


policy = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
optimizer = torch.optim.Adam(policy.parameters(), lr=5e-3)
env = Corridors(64)
for iteration in range(60):
    seen, logs, gains = env.reset(), [], []
    for _ in range(12):
        choice = Categorical(logits=policy(seen))
        action = choice.sample()
        logs.append(choice.log_prob(action))
        seen, gain = env.move(action.numpy())
        gains.append(torch.tensor(gain, dtype=torch.float32))
    togo = torch.stack(gains).flip(0).cumsum(0).flip(0)
    advantage = (togo - togo.mean(1, keepdim=True)) / (togo.std() + 1e-8)
    loss = -(torch.stack(logs) * advantage).sum(0).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if iteration % 5 == 4:
        print(f"iteration {iteration + 1} mean return {torch.stack(gains).sum(0).mean():.3f}")
