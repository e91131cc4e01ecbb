"""Advantage actor-critic with generalised advantage estimation on eight CartPoles."""

import os

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from torch import nn
from torch.distributions import Categorical

NUM_ENVS, ROLLOUT, UPDATES = 8, 16, 600
GAMMA, LAMBDA, LR = 0.99, 0.95, 2e-3
ENT_COEF, VF_COEF, MAX_GRAD_NORM = 0.01, 0.5, 0.5


def mlp(out, gain):
    layers = [nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, out)]
    for layer in layers[::2]:
        nn.init.orthogonal_(layer.weight, 2**0.5)
        nn.init.zeros_(layer.bias)
    nn.init.orthogonal_(layers[-1].weight, gain)
    return nn.Sequential(*layers)


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor, self.critic = mlp(2, 0.01), mlp(1, 1.0)

    def value(self, obs):
        return self.critic(obs).squeeze(-1)

    def forward(self, obs):
        return Categorical(logits=self.actor(obs)), self.value(obs)


def compute_gae(rewards, values, next_values, terminated, done):
    """All (time, env). A truncated episode is bootstrapped, a terminated one is not."""
    advantages = torch.zeros_like(rewards)
    last = torch.zeros(rewards.size(1))
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + GAMMA * next_values[t] * (1 - terminated[t]) - values[t]
        last = delta + GAMMA * LAMBDA * (1 - done[t]) * last
        advantages[t] = last
    return advantages, advantages + values


@torch.no_grad()
def evaluate(model, seed, episodes=20):
    env = gym.make("CartPole-v1")
    returns = []
    for episode in range(episodes):
        obs, _ = env.reset(seed=10_000 + 100 * seed + episode)
        total, over = 0.0, False
        while not over:
            action = model.actor(torch.as_tensor(obs)).argmax(-1).item()
            obs, reward, terminated, truncated, _ = env.step(action)
            total += reward
            over = terminated or truncated
        returns.append(total)
    return float(np.mean(returns))


def main():
    seed = int(os.environ.get("SEED", "0"))
    torch.manual_seed(seed)
    np.random.seed(seed)
    envs = gym.make_vec(
        "CartPole-v1",
        num_envs=NUM_ENVS,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": AutoresetMode.SAME_STEP},
    )
    model = ActorCritic()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=LR, alpha=0.99, eps=1e-5)
    obs, _ = envs.reset(seed=seed)
    for update in range(UPDATES):
        for group in optimizer.param_groups:
            group["lr"] = LR * (1 - update / UPDATES)
        log_probs, values, next_values, entropies, rewards, terminals, dones = [], [], [], [], [], [], []
        for _ in range(ROLLOUT):
            dist, value = model(torch.as_tensor(obs))
            action = dist.sample()
            obs, reward, terminated, truncated, info = envs.step(action.numpy())
            done = terminated | truncated
            after = obs.copy()
            if done.any():
                for i in np.flatnonzero(done):
                    after[i] = info["final_obs"][i]
            with torch.no_grad():
                next_values.append(model.value(torch.as_tensor(after)))
            log_probs.append(dist.log_prob(action))
            entropies.append(dist.entropy())
            values.append(value)
            rewards.append(torch.as_tensor(reward, dtype=torch.float32))
            terminals.append(torch.as_tensor(terminated, dtype=torch.float32))
            dones.append(torch.as_tensor(done, dtype=torch.float32))
        values = torch.stack(values)
        advantages, returns = compute_gae(
            torch.stack(rewards), values.detach(), torch.stack(next_values), torch.stack(terminals), torch.stack(dones)
        )
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        policy_loss = -(torch.stack(log_probs) * advantages).mean()
        value_loss = (returns - values).pow(2).mean()
        loss = policy_loss + VF_COEF * value_loss - ENT_COEF * torch.stack(entropies).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        if (update + 1) % 150 == 0:
            print(
                f"update {update + 1} value loss {value_loss.item():.2f} return {evaluate(model, seed, 5):.1f}",
                flush=True,
            )
    print(f"return {evaluate(model, seed):.2f}")


if __name__ == "__main__":
    main()
