"""REINFORCE with a learned value baseline on CartPole, a few episodes per update."""

import argparse

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim
from torch.distributions import Categorical


class PolicyNet(nn.Module):
    def __init__(self, obs_dim, n_actions, hidden=64):
        super().__init__()
        self.fc1 = nn.Linear(obs_dim, hidden)
        self.fc2 = nn.Linear(hidden, n_actions)

    def forward(self, x):
        return Categorical(logits=self.fc2(torch.tanh(self.fc1(x))))


class ValueNet(nn.Module):
    def __init__(self, obs_dim, hidden=64):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(obs_dim, hidden), nn.Tanh(), nn.Linear(hidden, 1))

    def forward(self, x):
        return self.layers(x).squeeze(-1)


def play(env, policy, rng):
    obs, _ = env.reset(seed=int(rng.integers(1 << 30)))
    states, actions, rewards = [], [], []
    done = False
    while not done:
        state = torch.as_tensor(obs, dtype=torch.float32)
        with torch.no_grad():
            action = policy(state).sample()
        obs, reward, terminated, truncated, _ = env.step(action.item())
        done = terminated or truncated
        states.append(state)
        actions.append(action)
        rewards.append(reward)
    return states, actions, rewards


def discounted_returns(rewards, gamma):
    returns = np.zeros(len(rewards), dtype=np.float32)
    R = 0.0
    for t in reversed(range(len(rewards))):
        R = rewards[t] + gamma * R
        returns[t] = R
    return returns


def evaluate(policy, episodes=10):
    env = gym.make("CartPole-v1", max_episode_steps=200)
    total = 0
    for i in range(episodes):
        obs, _ = env.reset(seed=5000 + i)
        done = False
        while not done:
            with torch.no_grad():
                action = policy(torch.as_tensor(obs)).probs.argmax().item()
            obs, reward, terminated, truncated, _ = env.step(action)
            done = terminated or truncated
            total += reward
    return total / episodes


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--gamma", type=float, default=0.99)
    p.add_argument("--lr", type=float, default=1e-2)
    p.add_argument("--updates", type=int, default=40)
    p.add_argument("--episodes", type=int, default=4, help="per update")
    p.add_argument("--entropy-coef", type=float, default=0.01)
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args()

    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    env = gym.make("CartPole-v1", max_episode_steps=200)
    policy = PolicyNet(env.observation_space.shape[0], env.action_space.n)
    value = ValueNet(env.observation_space.shape[0])
    policy_optim = optim.Adam(policy.parameters(), lr=args.lr)
    value_optim = optim.Adam(value.parameters(), lr=args.lr)

    for update in range(args.updates):
        states, actions, returns, lengths = [], [], [], []
        for _ in range(args.episodes):
            s, a, r = play(env, policy, rng)
            states += s
            actions += a
            returns.append(discounted_returns(r, args.gamma))
            lengths.append(len(r))
        states, actions = torch.stack(states), torch.stack(actions)
        returns = torch.from_numpy(np.concatenate(returns))

        values = value(states)
        advantage = returns - values.detach()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        dist = policy(states)
        policy_loss = -(dist.log_prob(actions) * advantage).mean() - args.entropy_coef * dist.entropy().mean()
        policy_optim.zero_grad()
        policy_loss.backward()
        policy_optim.step()

        value_loss = nn.functional.smooth_l1_loss(values, returns)
        value_optim.zero_grad()
        value_loss.backward()
        value_optim.step()
        if update % 10 == 0:
            print(f"update {update:3d}  mean length {np.mean(lengths):6.1f}  value loss {value_loss.item():.2f}")
    print(f"FINAL reward={evaluate(policy):.1f}")


if __name__ == "__main__":
    main()
