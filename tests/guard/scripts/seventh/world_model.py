"""Dynamics of Pendulum-v1 after PETS (quanvuong/handful-of-trials-pytorch): a bootstrapped ensemble of Gaussian networks, open-loop error."""

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

seed = 0
np.random.seed(seed)
torch.manual_seed(seed)
ENSEMBLE, HIDDEN, EPISODES, HORIZON = 3, 64, 20, 15


def rollout(env, seed, steps=200):
    """Transitions of random actions, each held for a few steps."""
    rng = np.random.default_rng(seed)
    memory = []
    obs, _ = env.reset(seed=seed)
    for t in range(steps):
        if t % 3 == 0:
            action = rng.uniform(-2, 2, 1).astype(np.float32)
        next_obs, reward, terminated, truncated, _ = env.step(action)
        memory.append((obs, action, next_obs))
        obs = next_obs
    return [torch.from_numpy(np.stack(part)).float() for part in zip(*memory)]


class PtModel(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.w = nn.ParameterList()
        self.b = nn.ParameterList()
        sizes = [in_features, HIDDEN, HIDDEN, 2 * out_features]
        for a, b in zip(sizes[:-1], sizes[1:]):
            self.w.append(nn.Parameter(torch.randn(ENSEMBLE, a, b) / a**0.5))
            self.b.append(nn.Parameter(torch.zeros(ENSEMBLE, 1, b)))
        self.max_logvar = nn.Parameter(torch.ones(1, out_features) / 2.0)
        self.min_logvar = nn.Parameter(-torch.ones(1, out_features) * 10.0)
        for name, size in (("in", in_features), ("out", out_features)):
            self.register_buffer(f"{name}_mu", torch.zeros(size))
            self.register_buffer(f"{name}_sigma", torch.ones(size))

    def fit_input_stats(self, inputs, targets):
        self.in_mu, self.in_sigma = inputs.mean(0), inputs.std(0)
        self.out_mu, self.out_sigma = targets.mean(0), targets.std(0)

    def forward(self, inputs):
        x = (inputs - self.in_mu) / self.in_sigma
        for w, b in zip(self.w[:-1], self.b[:-1]):
            x = F.silu(torch.baddbmm(b, x, w))
        x = torch.baddbmm(self.b[-1], x, self.w[-1])
        mean, logvar = x.chunk(2, dim=2)
        logvar = self.max_logvar - F.softplus(self.max_logvar - logvar)
        logvar = self.min_logvar + F.softplus(logvar - self.min_logvar)
        return mean, logvar

    def step(self, obs, action):
        inputs = torch.cat([obs, action], dim=-1).expand(ENSEMBLE, -1, -1)
        delta = self(inputs)[0].mean(0) * self.out_sigma + self.out_mu
        return obs + delta


def train(model, optimizer, inputs, targets, epochs, batch_size=64):
    scaled = (targets - model.out_mu) / model.out_sigma
    idxs = np.random.randint(len(inputs), size=[ENSEMBLE, len(inputs)])
    for epoch in range(epochs):
        idxs = np.stack([row[np.random.permutation(len(row))] for row in idxs])
        for batch in range(len(inputs) // batch_size):
            batch_idxs = idxs[:, batch * batch_size : (batch + 1) * batch_size]
            loss = 0.01 * (model.max_logvar.sum() - model.min_logvar.sum())
            mean, logvar = model(inputs[batch_idxs])
            inv_var = torch.exp(-logvar)
            train_losses = ((mean - scaled[batch_idxs]) ** 2) * inv_var + logvar
            loss = loss + train_losses.mean(-1).mean(-1).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if epoch % 4 == 0:
            mse = (mean - scaled[batch_idxs]).pow(2).mean().item()
            print(f"epoch {epoch} loss {loss.item():.3f} mse {mse:.5f}")


env = gym.make("Pendulum-v1")
obs, action, next_obs = (torch.cat(part) for part in zip(*(rollout(env, seed * 100 + i) for i in range(EPISODES))))
test = [rollout(env, 9000 + i) for i in range(5)]
model = PtModel(in_features=4, out_features=3)
inputs, targets = torch.cat([obs, action], dim=1), next_obs - obs
model.fit_input_stats(inputs, targets)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
train(model, optimizer, inputs, targets, epochs=14)

errors = []
with torch.no_grad():
    for o, a, after in test:
        starts = torch.arange(0, len(o) - HORIZON, 5)
        state = o[starts]
        for h in range(HORIZON):
            state = model.step(state, a[starts + h])
        errors.append((state - after[starts + HORIZON - 1]).pow(2).mean().sqrt().item())
print(f"FINAL open_loop_rmse={np.mean(errors):.4f}")
