"""Double DQN with a dueling net on CartPole: replay memory, soft target updates, in the shape of the PyTorch tutorial."""

import math
import random
from collections import deque, namedtuple

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim

Transition = namedtuple("Transition", ("state", "action", "reward", "next_state", "done"))

BATCH_SIZE = 64
GAMMA = 0.98
EPS_START, EPS_END, EPS_DECAY = 0.9, 0.05, 1000
TAU = 0.02
LR = 1e-3
MEMORY = 10000
TOTAL_STEPS = 6000


class ReplayMemory:
    def __init__(self, capacity):
        self.memory = deque([], maxlen=capacity)

    def push(self, *args):
        self.memory.append(Transition(*args))

    def sample(self, batch_size):
        return random.sample(self.memory, batch_size)

    def __len__(self):
        return len(self.memory)


class DuelingDQN(nn.Module):
    def __init__(self, n_observations, n_actions):
        super().__init__()
        self.layer1 = nn.Linear(n_observations, 96)
        self.layer2 = nn.Linear(96, 96)
        self.value = nn.Linear(96, 1)
        self.advantage = nn.Linear(96, n_actions)

    def forward(self, x):
        x = F.relu(self.layer1(x))
        x = F.relu(self.layer2(x))
        a = self.advantage(x)
        return self.value(x) + a - a.mean(dim=1, keepdim=True)


class Agent:
    def __init__(self, n_observations, n_actions):
        self.n_actions = n_actions
        self.policy_net = DuelingDQN(n_observations, n_actions)
        self.target_net = DuelingDQN(n_observations, n_actions)
        self.target_net.load_state_dict(self.policy_net.state_dict())
        self.optimizer = optim.AdamW(self.policy_net.parameters(), lr=LR, amsgrad=True)
        self.memory = ReplayMemory(MEMORY)
        self.steps_done = 0

    def select_action(self, state):
        eps = EPS_END + (EPS_START - EPS_END) * math.exp(-self.steps_done / EPS_DECAY)
        self.steps_done += 1
        if random.random() > eps:
            return self.greedy(state)
        return random.randrange(self.n_actions)

    @torch.no_grad()
    def greedy(self, state):
        return self.policy_net(torch.as_tensor(state).unsqueeze(0)).argmax(1).item()

    def optimize_model(self):
        if len(self.memory) < BATCH_SIZE * 4:
            return
        batch = Transition(*zip(*self.memory.sample(BATCH_SIZE)))
        states = torch.from_numpy(np.stack(batch.state))
        actions = torch.tensor(batch.action).unsqueeze(1)
        rewards = torch.tensor(batch.reward, dtype=torch.float32)
        next_states = torch.from_numpy(np.stack(batch.next_state))
        dones = torch.tensor(batch.done, dtype=torch.float32)

        q = self.policy_net(states).gather(1, actions).squeeze(1)
        with torch.no_grad():
            next_actions = self.policy_net(next_states).argmax(1, keepdim=True)
            next_q = self.target_net(next_states).gather(1, next_actions).squeeze(1)
            expected = rewards + GAMMA * next_q * (1 - dones)
        loss = F.smooth_l1_loss(q, expected)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(self.policy_net.parameters(), 100)
        self.optimizer.step()

        for target, param in zip(self.target_net.parameters(), self.policy_net.parameters()):
            target.data.copy_(TAU * param.data + (1 - TAU) * target.data)


def evaluate(agent, episodes=10):
    env = gym.make("CartPole-v1")
    returns = []
    for i in range(episodes):
        state, _ = env.reset(seed=1000 + i)
        done, total = False, 0
        while not done:
            state, reward, terminated, truncated, _ = env.step(agent.greedy(state))
            total += reward
            done = terminated or truncated
        returns.append(total)
    return np.mean(returns)


def main():
    random.seed(0)
    torch.manual_seed(0)
    env = gym.make("CartPole-v1")
    agent = Agent(env.observation_space.shape[0], env.action_space.n)
    state, _ = env.reset(seed=0)
    episode_return, history = 0, []
    for step in range(1, TOTAL_STEPS + 1):
        action = agent.select_action(state)
        next_state, reward, terminated, truncated, _ = env.step(action)
        agent.memory.push(state, action, reward, next_state, terminated)
        state = next_state
        episode_return += reward
        agent.optimize_model()
        if terminated or truncated:
            history.append(episode_return)
            episode_return = 0
            state, _ = env.reset()
        if step % 2000 == 0:
            print(f"step {step} last returns {np.mean(history[-10:]):.1f} greedy {evaluate(agent):.1f}")
            torch.save(agent.policy_net.state_dict(), "dqn.pt")


if __name__ == "__main__":
    main()
