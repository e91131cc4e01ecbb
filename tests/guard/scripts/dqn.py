"""CleanRL's DQN: replay memory, a target network that is copied every few hundred steps, epsilon-greedy."""

import random
from collections import deque

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn, optim

random.seed(1), torch.manual_seed(1)


class QNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))

    def forward(self, x):
        return self.network(x)


env = gym.make("CartPole-v1")
q_network, target_network = QNetwork(), QNetwork()
optimizer = optim.Adam(q_network.parameters(), lr=2.5e-4)
target_network.load_state_dict(q_network.state_dict())
memory = deque(maxlen=5000)
obs, _ = env.reset(seed=1)
for step in range(3000):
    if random.random() < max(0.05, 1 - step / 1000):
        action = env.action_space.sample()
    else:
        action = int(q_network(torch.tensor(obs)).argmax())
    nxt, reward, term, trunc, _ = env.step(action)
    memory.append((obs, action, reward, nxt, float(term)))
    obs = env.reset()[0] if term or trunc else nxt
    if step > 300 and step % 4 == 0:
        rows = random.sample(memory, 64)
        o, a, r, n, d = (torch.tensor(np.array(x), dtype=torch.float32) for x in zip(*rows))
        with torch.no_grad():
            best, _ = target_network(n).max(1)
            goal = r + 0.99 * best * (1 - d)
        old = q_network(o).gather(1, a.long()[:, None]).squeeze()
        loss = F.mse_loss(goal, old)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if step % 500 == 0:
        target_network.load_state_dict(q_network.state_dict())
        print(f"step {step}")
