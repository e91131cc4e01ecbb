"""DDPG in one file, after CleanRL's ddpg_continuous_action.py."""

import os
import random
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim


@dataclass
class Args:
    seed: int = int(os.environ.get("SEED", "0"))
    env_id: str = "Pendulum-v1"
    total_timesteps: int = 7000
    learning_rate: float = 1e-3
    buffer_size: int = 10000
    gamma: float = 0.98
    tau: float = 0.01
    batch_size: int = 128
    exploration_noise: float = 0.1
    learning_starts: int = 1000
    policy_frequency: int = 2


class QNetwork(nn.Module):
    def __init__(self, env):
        super().__init__()
        self.fc1 = nn.Linear(env.observation_space.shape[0] + env.action_space.shape[0], 64)
        self.fc2 = nn.Linear(64, 64)
        self.fc3 = nn.Linear(64, 1)

    def forward(self, x, a):
        x = torch.cat([x, a], 1)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


class Actor(nn.Module):
    def __init__(self, env):
        super().__init__()
        self.fc1 = nn.Linear(env.observation_space.shape[0], 64)
        self.fc2 = nn.Linear(64, 64)
        self.fc_mu = nn.Linear(64, env.action_space.shape[0])
        high, low = torch.tensor(env.action_space.high), torch.tensor(env.action_space.low)
        self.register_buffer("action_scale", (high - low) / 2.0)
        self.register_buffer("action_bias", (high + low) / 2.0)

    def forward(self, x):
        x = torch.tanh(self.fc_mu(F.relu(self.fc2(F.relu(self.fc1(x))))))
        return x * self.action_scale + self.action_bias


class ReplayBuffer:
    def __init__(self, size, obs_dim, act_dim):
        self.obs, self.next_obs = np.zeros((size, obs_dim), np.float32), np.zeros((size, obs_dim), np.float32)
        self.actions = np.zeros((size, act_dim), np.float32)
        self.rewards, self.dones = np.zeros((size, 1), np.float32), np.zeros((size, 1), np.float32)
        self.size, self.pos, self.full = size, 0, False

    def add(self, obs, next_obs, action, reward, done):
        self.obs[self.pos], self.next_obs[self.pos], self.actions[self.pos] = obs, next_obs, action
        self.rewards[self.pos], self.dones[self.pos] = reward, done
        self.pos = (self.pos + 1) % self.size
        self.full = self.full or self.pos == 0

    def sample(self, n):
        i = np.random.randint(0, self.size if self.full else self.pos, size=n)
        return (torch.from_numpy(a[i]) for a in (self.obs, self.next_obs, self.actions, self.rewards, self.dones))


@torch.no_grad()
def evaluate(actor, env_id, episodes=10):
    env, returns = gym.make(env_id), []
    for episode in range(episodes):
        obs, _ = env.reset(seed=10_000 + episode)
        total, done = 0.0, False
        while not done:
            obs, reward, terminated, truncated, _ = env.step(actor(torch.from_numpy(obs)[None])[0].numpy())
            total, done = total + float(reward), terminated or truncated
        returns.append(total)
    return np.mean(returns)


def main():
    args = Args()
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    env = gym.wrappers.RecordEpisodeStatistics(gym.make(args.env_id))
    env.action_space.seed(args.seed)
    actor, target_actor, qf1, qf1_target = Actor(env), Actor(env), QNetwork(env), QNetwork(env)
    target_actor.load_state_dict(actor.state_dict())
    qf1_target.load_state_dict(qf1.state_dict())
    q_optimizer = optim.Adam(qf1.parameters(), lr=args.learning_rate)
    actor_optimizer = optim.Adam(actor.parameters(), lr=args.learning_rate)
    rb = ReplayBuffer(args.buffer_size, 3, 1)

    obs, _ = env.reset(seed=args.seed)
    for global_step in range(args.total_timesteps):
        if global_step < args.learning_starts:
            action = env.action_space.sample()
        else:
            with torch.no_grad():
                action = actor(torch.from_numpy(obs)[None])[0]
                action += torch.normal(0, actor.action_scale * args.exploration_noise)
                action = action.numpy().clip(env.action_space.low, env.action_space.high)
        next_obs, reward, terminated, truncated, info = env.step(action)
        rb.add(obs, next_obs, action, reward, terminated)
        obs = next_obs
        if terminated or truncated:
            print(f"global_step={global_step}, episodic_return={info['episode']['r']:.1f}")
            obs, _ = env.reset()

        if global_step > args.learning_starts:
            s, s2, a, r, d = rb.sample(args.batch_size)
            with torch.no_grad():
                next_q = qf1_target(s2, target_actor(s2))
                target = r.flatten() + (1 - d.flatten()) * args.gamma * next_q.view(-1)
            qf1_loss = F.mse_loss(qf1(s, a).view(-1), target)
            q_optimizer.zero_grad()
            qf1_loss.backward()
            q_optimizer.step()
            if global_step % args.policy_frequency == 0:
                actor_loss = -qf1(s, actor(s)).mean()
                actor_optimizer.zero_grad()
                actor_loss.backward()
                actor_optimizer.step()
                for net, net_target in ((actor, target_actor), (qf1, qf1_target)):
                    for p, p_target in zip(net.parameters(), net_target.parameters()):
                        p_target.data.copy_(args.tau * p.data + (1 - args.tau) * p_target.data)
    print(f"mean return {evaluate(actor, args.env_id):.2f}")


if __name__ == "__main__":
    main()
