"""A dueling DQN in a corridor with a goal and a pit: five step sizes, the reward is in two cells; mean return of the greedy policy."""

import random
from collections import deque

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

SEED = 0
random.seed(SEED)
np.random.seed(SEED)
torch.manual_seed(SEED)
STEPS = [-3, -1, 0, 1, 3]
LENGTH = 24


class Corridor:
    """A walker in cells 0..23. Cell 17 ends the episode with +1, cell 4 with -1, and each step costs 0.02."""

    def reset(self):
        self.time, self.reward = 0, 0.0
        self.cell = random.choice([c for c in range(LENGTH) if c not in (4, 17)])
        return self.observe()

    def observe(self):
        return np.eye(LENGTH, dtype=np.float32)[self.cell]

    def step(self, action):
        self.time += 1
        self.cell = int(np.clip(self.cell + STEPS[action], 0, LENGTH - 1))
        self.reward = -0.02
        done = False
        if self.cell == 17:
            self.reward, done = 1.0, True
        elif self.cell == 4:
            self.reward, done = -1.0, True
        return self.observe(), self.reward, done, self.time >= 30


class DuelingDQN(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(LENGTH, 64)
        self.fc_value = nn.Linear(64, 1)
        self.fc_adv = nn.Linear(64, len(STEPS))

    def forward(self, x):
        h = F.relu(self.body(x))
        value, adv = self.fc_value(h), self.fc_adv(h)
        return value + adv - adv.mean(dim=1, keepdim=True)


env, memory = Corridor(), deque(maxlen=3000)
policy_net, target_net = DuelingDQN(), DuelingDQN()
target_net.load_state_dict(policy_net.state_dict())
optimizer = torch.optim.Adam(policy_net.parameters(), lr=2e-3)
gamma, batch_size, updates = 0.95, 64, 0
for episode in range(250):
    state, epsilon = env.reset(), max(0.1, 1 - episode / 150)
    while True:
        if random.random() < epsilon:
            action = random.randrange(len(STEPS))
        else:
            with torch.no_grad():
                action = policy_net(torch.from_numpy(state)[None]).argmax().item()
        next_state, reward, done, timeout = env.step(action)
        memory.append((state, action, reward, next_state, float(done)))
        state = next_state
        if len(memory) >= 200:
            s, a, r, s2, d = (torch.tensor(np.array(t)) for t in zip(*random.sample(memory, batch_size)))
            q = policy_net(s).gather(1, a.unsqueeze(1)).squeeze(1)
            with torch.no_grad():
                expected = r.float() + gamma * target_net(s2).max(1).values * (1 - d.float())
            loss = F.smooth_l1_loss(q, expected)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            updates += 1
            if updates % 100 == 0:
                target_net.load_state_dict(policy_net.state_dict())
        if done or timeout:
            break

returns = []
for _ in range(200):
    state, total, end = env.reset(), 0.0, False
    while not end:
        with torch.no_grad():
            action = policy_net(torch.from_numpy(state)[None]).argmax().item()
        state, reward, done, timeout = env.step(action)
        total += 1.0 if env.cell == 17 else -1.0 if env.cell == 4 else -0.02
        end = done or timeout
    returns.append(total)
print(f"FINAL return={np.mean(returns):.4f}")
