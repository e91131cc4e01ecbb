"""DQN on a small maze of our own: reach the goal, avoid the pits, each move costs a little."""

import random
from collections import deque

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

SEED = 0
MAZE = ["S....", ".P.P.", "...P.", ".P...", ".P.PG"]
MOVES = [(-1, 0), (0, 1), (1, 0), (0, -1)]


class Maze:
    def __init__(self, max_steps=40):
        self.max_steps = max_steps
        self.free = [(r, c) for r in range(5) for c in range(5) if MAZE[r][c] in "S."]

    def observation(self):
        state = np.zeros(25, dtype=np.float32)
        state[self.pos[0] * 5 + self.pos[1]] = 1.0
        return state

    def reset(self, random_start=True):
        self.pos = random.choice(self.free) if random_start else (0, 0)
        self.steps = 0
        return self.observation()

    def step(self, action):
        r, c = self.pos[0] + MOVES[action][0], self.pos[1] + MOVES[action][1]
        if 0 <= r < 5 and 0 <= c < 5:
            self.pos = (r, c)
        self.steps += 1
        cell = MAZE[self.pos[0]][self.pos[1]]
        reward = {"G": 1.0, "P": -1.0}.get(cell, -0.02)
        return self.observation(), reward, cell in "GP", self.steps >= self.max_steps


class QNetwork(nn.Module):
    def __init__(self, n_states=25, n_actions=4):
        super().__init__()
        self.fc1 = nn.Linear(n_states, 64)
        self.fc2 = nn.Linear(64, 64)
        self.out = nn.Linear(64, n_actions)

    def forward(self, x):
        return self.out(F.relu(self.fc2(F.relu(self.fc1(x)))))


class Agent:
    def __init__(self, gamma=0.95, lr=1e-3, batch_size=64, sync_every=100):
        self.gamma, self.batch_size, self.sync_every = gamma, batch_size, sync_every
        self.q, self.target = QNetwork(), QNetwork()
        self.target.load_state_dict(self.q.state_dict())
        self.optimizer = torch.optim.Adam(self.q.parameters(), lr=lr)
        self.memory = deque(maxlen=5000)
        self.epsilon, self.updates = 1.0, 0

    def act(self, state, epsilon):
        if random.random() < epsilon:
            return random.randrange(4)
        with torch.no_grad():
            return self.q(torch.from_numpy(state).unsqueeze(0)).argmax(dim=1).item()

    def learn(self):
        batch = random.sample(self.memory, self.batch_size)
        states, actions, rewards, next_states, dones = zip(*batch)
        states, next_states = torch.from_numpy(np.array(states)), torch.from_numpy(np.array(next_states))
        actions = torch.tensor(actions).unsqueeze(1)
        rewards, dones = torch.tensor(rewards), torch.tensor(dones, dtype=torch.float32)
        q_values = self.q(states).gather(1, actions).squeeze(1)
        with torch.no_grad():
            next_q = self.target(next_states).max(dim=1).values
            targets = rewards + self.gamma * next_q * (1 - dones)
        loss = F.smooth_l1_loss(q_values, targets)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.q.parameters(), 10.0)
        self.optimizer.step()
        self.updates += 1
        if self.updates % self.sync_every == 0:
            self.target.load_state_dict(self.q.state_dict())


def play(env, agent, epsilon, learn, random_start=True):
    state, total, finished = env.reset(random_start), 0.0, False
    while not finished:
        action = agent.act(state, epsilon)
        next_state, reward, done, truncated = env.step(action)
        if learn:
            agent.memory.append((state, action, reward, next_state, done))
            if len(agent.memory) >= 500:
                agent.learn()
        state = next_state
        total += reward
        finished = done or truncated
    return total


random.seed(SEED)
np.random.seed(SEED)
torch.manual_seed(SEED)
env, agent = Maze(), Agent()
returns = []
for episode in range(700):
    returns.append(play(env, agent, agent.epsilon, learn=True))
    agent.epsilon = max(0.05, agent.epsilon * 0.993)
    if (episode + 1) % 100 == 0:
        print(f"episode {episode + 1}: mean return {np.mean(returns[-100:]):.3f}, epsilon {agent.epsilon:.2f}")
score = np.mean([play(env, agent, epsilon=0.0, learn=False) for _ in range(100)])
print(f"FINAL mean_return={score:.3f}")
