"""A diffusion model of two moons, sampled by DDIM in 25 of its 100 steps; the share of samples that lie on a moon."""

import numpy as np
import torch
import torch.nn as nn
from sklearn.datasets import make_moons

SEED = 0
torch.manual_seed(SEED)
points, _ = make_moons(4000, noise=0.04, random_state=SEED)
points = torch.tensor((points - points.mean(0)) / points.std(0), dtype=torch.float32)

T = 100


def linear_beta_schedule(timesteps):
    scale = 1000 / timesteps
    return torch.linspace(scale * 0.0001, scale * 0.02, timesteps)


betas = linear_beta_schedule(T)
alphas_cumprod = torch.cumprod(1.0 - betas, dim=0)


class Denoiser(nn.Module):
    def __init__(self, hidden=96):
        super().__init__()
        self.time = nn.Embedding(T, 32)
        self.net = nn.Sequential(
            nn.Linear(2 + 32, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, 2)
        )

    def forward(self, x, t):
        return self.net(torch.cat([x, self.time(t)], dim=1))


def q_sample(x0, t, noise):
    a = alphas_cumprod[t].unsqueeze(1)
    return a.sqrt() * x0 + (1 - a).sqrt() * noise


model = Denoiser()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for step in range(2000):
    x0 = points[torch.randint(len(points), (128,))]
    t = torch.randint(0, T, (128,))
    noise = torch.randn_like(x0)
    loss = ((model(q_sample(x0, t, noise), t) - noise) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 500 == 0:
        print(step, round(loss.item(), 4))


@torch.no_grad()
def ddim_sample(n, steps=25):
    timesteps = np.linspace(0, T - 1, steps).astype(int)[::-1]
    x = torch.randn(n, 2)
    for i, t in enumerate(timesteps):
        a = alphas_cumprod[t]
        a_prev = alphas_cumprod[timesteps[i + 1]] if i + 1 < steps else torch.tensor(1.0)
        eps = model(x, torch.full((n,), int(t)))
        x0 = (x - (1 - a).sqrt() * eps) / a.sqrt()
        x = a_prev.sqrt() * x0 + (1 - a_prev).sqrt() * eps
    return x


model.eval()
samples = ddim_sample(1000)
near = torch.cdist(samples, points).min(1).values
print(f"FINAL on_moon={(near < 0.2).float().mean().item():.4f}")
