"""Advantage actor-critic on CartPole with eight environments side by side and generalised advantage estimation."""

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
from torch.distributions import Categorical

SEED = 0
N_ENVS = 8
N_STEPS = 16
N_UPDATES = 400
GAMMA, LAM = 0.99, 0.95
ENTROPY_COEF, VALUE_COEF = 0.005, 0.5


class ActorCritic(nn.Module):
    def __init__(self, obs_dim, n_actions):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(obs_dim, 64), nn.Tanh(), nn.Linear(64, n_actions))
        self.critic = nn.Sequential(nn.Linear(obs_dim, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, x):
        return Categorical(logits=self.actor(x)), self.critic(x).squeeze(-1)


def compute_gae(rewards, values, dones, last_value):
    advantages = torch.zeros_like(rewards)
    gae = torch.zeros_like(last_value)
    next_value = last_value
    for t in reversed(range(len(rewards))):
        alive = 1.0 - dones[t]
        delta = rewards[t] + GAMMA * next_value * alive - values[t]
        gae = delta + GAMMA * LAM * alive * gae
        advantages[t] = gae
        next_value = values[t]
    return advantages


def evaluate(model, episodes=20):
    env = gym.make("CartPole-v1")
    scores = []
    for ep in range(episodes):
        obs, _ = env.reset(seed=1000 + ep)
        done, score = False, 0.0
        while not done:
            with torch.no_grad():
                dist, _ = model(torch.as_tensor(obs))
            obs, reward, terminated, truncated, _ = env.step(dist.probs.argmax().item())
            score += reward
            done = terminated or truncated
        scores.append(score)
    return np.mean(scores)


def main():
    torch.manual_seed(SEED)
    np.random.seed(SEED)
    envs = gym.make_vec(
        "CartPole-v1",
        num_envs=N_ENVS,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP},
    )
    model = ActorCritic(4, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total_iters=N_UPDATES)
    obs, _ = envs.reset(seed=SEED)
    episode_return, finished = np.zeros(N_ENVS), []

    for update in range(1, N_UPDATES + 1):
        log_probs, values, rewards, dones, entropies = [], [], [], [], []
        for _ in range(N_STEPS):
            dist, value = model(torch.as_tensor(obs, dtype=torch.float32))
            action = dist.sample()
            obs, reward, terminated, truncated, _ = envs.step(action.numpy())
            done = terminated | truncated
            log_probs.append(dist.log_prob(action))
            entropies.append(dist.entropy())
            values.append(value)
            rewards.append(torch.as_tensor(reward, dtype=torch.float32))
            dones.append(torch.as_tensor(done, dtype=torch.float32))
            episode_return += reward
            finished += episode_return[done].tolist()
            episode_return[done] = 0

        values, log_probs = torch.stack(values), torch.stack(log_probs)
        with torch.no_grad():
            _, last_value = model(torch.as_tensor(obs, dtype=torch.float32))
            advantages = compute_gae(torch.stack(rewards), values, dones, last_value)
            returns = advantages + values
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        policy_loss = -(log_probs * advantages).mean()
        value_loss = (returns - values).pow(2).mean()
        loss = policy_loss + VALUE_COEF * value_loss - ENTROPY_COEF * torch.stack(entropies).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        if update % 50 == 0:
            print(f"update {update} return {np.mean(finished[-30:]):.1f} value loss {value_loss.item():.2f}")

    print(f"FINAL score={evaluate(model):.1f}")


if __name__ == "__main__":
    main()
