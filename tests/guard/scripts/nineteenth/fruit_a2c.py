"""A2C with n-step returns on sixteen copies of a small game: catch the falling fruit, leave the stones."""

import numpy as np
import torch
import torch.nn as nn
from torch.distributions import Categorical

SEED = 0


class FruitEnv:
    """A basket below a 7 x 6 field. A fruit (+1) or a stone (-1) falls; the basket moves left, stays or moves right."""

    def __init__(self, n_envs, seed):
        self.n, self.rng = n_envs, np.random.default_rng(seed)
        self.drops = np.zeros(n_envs, dtype=int)
        self.basket = np.full(n_envs, 3)
        self.row = np.zeros(n_envs, dtype=int)
        self.column = self.rng.integers(7, size=n_envs)
        self.stone = self.rng.random(n_envs) < 0.3

    def observe(self):
        field = np.zeros((self.n, 2, 6, 7), dtype=np.float32)
        field[np.arange(self.n), self.stone.astype(int), self.row, self.column] = 1.0
        basket = np.eye(7, dtype=np.float32)[self.basket]
        return np.concatenate([field.reshape(self.n, -1), basket], axis=1)

    def step(self, actions):
        self.basket = np.clip(self.basket + actions - 1, 0, 6)
        self.row += 1
        landed = self.row == 5
        caught = landed & (self.basket == self.column)
        rewards = caught * np.where(self.stone, -1.0, 1.0)
        self.drops += landed
        dones = self.drops == 5
        for i in np.flatnonzero(landed):
            self.row[i], self.column[i], self.stone[i] = 0, self.rng.integers(7), self.rng.random() < 0.3
        for i in np.flatnonzero(dones):
            self.drops[i], self.basket[i] = 0, 3
        return self.observe(), rewards.astype(np.float32), dones.astype(np.float32)


class ActorCritic(nn.Module):
    def __init__(self, n_obs=91, n_actions=3):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(n_obs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.policy = nn.Linear(64, n_actions)
        self.value = nn.Linear(64, 1)

    def forward(self, x):
        h = self.body(x)
        return Categorical(logits=self.policy(h)), self.value(h).squeeze(-1)


def evaluate(model, steps=400):
    """Mean reward per drop of the best action (0.7 is the most)."""
    env = FruitEnv(50, seed=1234)
    obs, total, drops = env.observe(), 0.0, steps * 50 / 5
    with torch.no_grad():
        for _ in range(steps):
            dist, _ = model(torch.from_numpy(obs))
            obs, rewards, _ = env.step(dist.probs.argmax(dim=-1).numpy())
            total += rewards.sum()
    return total / drops


def train(n_envs=16, n_steps=8, updates=1200, gamma=0.95, value_coef=0.5, entropy_coef=0.01):
    torch.manual_seed(SEED)
    env = FruitEnv(n_envs, SEED)
    model = ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    obs, recent = env.observe(), []
    for update in range(updates):
        log_probs, values, rewards, masks, entropies = [], [], [], [], []
        for _ in range(n_steps):
            dist, value = model(torch.from_numpy(obs))
            action = dist.sample()
            obs, reward, done = env.step(action.numpy())
            log_probs.append(dist.log_prob(action))
            entropies.append(dist.entropy())
            values.append(value)
            rewards.append(torch.from_numpy(reward))
            masks.append(torch.from_numpy(1 - done))
            recent.append(reward.mean())

        with torch.no_grad():
            _, next_value = model(torch.from_numpy(obs))
        returns, R = [], next_value
        for t in reversed(range(n_steps)):
            R = rewards[t] + gamma * R * masks[t]
            returns.insert(0, R)

        returns, values = torch.stack(returns), torch.stack(values)
        advantages = returns - values
        policy_loss = -(torch.stack(log_probs) * advantages.detach()).mean()
        value_loss = advantages.pow(2).mean()
        entropy = torch.stack(entropies).mean()
        loss = policy_loss + value_coef * value_loss - entropy_coef * entropy
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        if (update + 1) % 200 == 0:
            print(f"update {update + 1}: reward per step {np.mean(recent[-1000:]):.4f}, entropy {entropy.item():.3f}")
    return model


if __name__ == "__main__":
    print(f"FINAL reward_per_drop={evaluate(train()):.4f}")
