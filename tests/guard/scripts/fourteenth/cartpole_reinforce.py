"""REINFORCE with a learnt baseline on CartPole. Prints the mean return of the last episodes, at the end of greedy episodes."""

import argparse
from collections import deque

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Categorical


class Policy(nn.Module):
    def __init__(self, obs_dim, n_actions, hidden=64):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(obs_dim, hidden), nn.Tanh(), nn.Linear(hidden, n_actions))
        self.critic = nn.Sequential(nn.Linear(obs_dim, hidden), nn.Tanh(), nn.Linear(hidden, 1))

    def forward(self, obs):
        return Categorical(logits=self.actor(obs)), self.critic(obs).squeeze(-1)

    def act(self, obs):
        with torch.no_grad():
            dist, _ = self(torch.as_tensor(obs, dtype=torch.float32))
            return dist.sample().item()


class Buffer:
    def __init__(self):
        self.obs, self.actions, self.rewards, self.dones = [], [], [], []

    def add(self, obs, action, reward, done):
        self.obs.append(obs)
        self.actions.append(action)
        self.rewards.append(reward)
        self.dones.append(done)

    def __len__(self):
        return len(self.rewards)

    def tensors(self, gamma):
        returns, running = [], 0.0
        for reward, done in zip(reversed(self.rewards), reversed(self.dones)):
            running = reward + gamma * running * (1.0 - done)
            returns.insert(0, running)
        return (
            torch.as_tensor(np.array(self.obs), dtype=torch.float32),
            torch.as_tensor(self.actions),
            torch.as_tensor(returns, dtype=torch.float32),
        )


def collect(env, policy, steps, recent):
    """Whole episodes, until there are at least `steps` steps."""
    buffer, total = Buffer(), 0.0
    obs, _ = env.reset()
    while True:
        action = policy.act(obs)
        next_obs, reward, terminated, truncated, _ = env.step(action)
        done = terminated or truncated
        buffer.add(obs, action, reward, float(done))
        total += reward
        obs = next_obs
        if done:
            recent.append(total)
            total = 0.0
            if len(buffer) >= steps:
                return buffer
            obs, _ = env.reset()


def update(policy, optimizer, buffer, args):
    obs, actions, returns = buffer.tensors(args.gamma)
    dist, values = policy(obs)
    advantages = returns - values.detach()
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    policy_loss = -(dist.log_prob(actions) * advantages).mean()
    value_loss = F.mse_loss(values, returns) / 100
    loss = policy_loss + value_loss - args.entropy * dist.entropy().mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def evaluate(policy, episodes, seed):
    env = gym.make("CartPole-v1")
    scores = []
    for episode in range(episodes):
        obs, _ = env.reset(seed=10_000 + 100 * seed + episode)
        done, score = False, 0.0
        while not done:
            with torch.no_grad():
                dist, _ = policy(torch.as_tensor(obs, dtype=torch.float32))
            obs, reward, terminated, truncated, _ = env.step(dist.probs.argmax().item())
            done, score = terminated or truncated, score + reward
        scores.append(score)
    return float(np.mean(scores))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--gamma", type=float, default=0.98)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--entropy", type=float, default=0.005)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="/tmp/cartpole_reinforce.pt")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    np.random.seed(args.seed)
    env = gym.make("CartPole-v1")
    env.reset(seed=args.seed)
    policy = Policy(env.observation_space.shape[0], env.action_space.n)
    optimizer = torch.optim.Adam(policy.parameters(), lr=args.lr)
    recent = deque(maxlen=20)
    for iteration in range(1, args.updates + 1):
        policy.train()
        buffer = collect(env, policy, args.steps, recent)
        loss = update(policy, optimizer, buffer, args)
        if iteration % 5 == 0:
            score = evaluate(policy.eval(), 5, args.seed)
            print(f"update {iteration:3d}  loss {loss:8.3f}  mean return {np.mean(recent):6.1f}  greedy {score:6.1f}")
            torch.save(policy.state_dict(), args.model)
    print(f"FINAL mean_return={evaluate(policy.eval(), 10, args.seed):.1f}")


if __name__ == "__main__":
    main()
