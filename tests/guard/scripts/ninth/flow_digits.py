"""Flow matching (rectified flow) on 8x8 digits: straight paths from noise to data, samples by Euler's method from averaged weights."""

import copy

import numpy as np
import torch
import torch.nn.functional as F
from scipy.linalg import sqrtm
from sklearn.datasets import load_digits
from torch import nn
from tqdm import trange

SEED = 0
torch.manual_seed(SEED)
np.random.seed(SEED)

DIM, HIDDEN, BATCH_SIZE, N_STEPS, EMA_DECAY = 64, 192, 64, 1500, 0.995


class TimeEmbedding(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.register_buffer("freqs", torch.exp(torch.linspace(0, 5, dim // 2)))

    def forward(self, t):
        angles = t * self.freqs
        return torch.cat([angles.sin(), angles.cos()], dim=-1)


class VelocityNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Sequential(TimeEmbedding(32), nn.Linear(32, HIDDEN), nn.SiLU())
        self.inp = nn.Linear(DIM, HIDDEN)
        self.mid = nn.ModuleList([nn.Linear(HIDDEN, HIDDEN) for _ in range(3)])
        self.out = nn.Linear(HIDDEN, DIM)

    def forward(self, x, t):
        emb = self.time(t)
        h = self.inp(x)
        for layer in self.mid:
            h = h + layer(F.silu(h + emb))
        return self.out(F.silu(h))


@torch.no_grad()
def sample(net, n, steps=40):
    net.eval()
    x = torch.randn(n, DIM)
    for i in range(steps):
        t = torch.full((n, 1), i / steps)
        x = x + net(x, t) / steps
    return x.clamp(-1, 1)


def frechet_distance(a, b):
    """Distance of two Gaussians, as FID measures it, on pixels from 0 to 1."""
    mu_a, mu_b = a.mean(0), b.mean(0)
    cov_a, cov_b = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    eps = 1e-6 * np.eye(len(mu_a))
    root = sqrtm((cov_a + eps) @ (cov_b + eps)).real
    return ((mu_a - mu_b) ** 2).sum() + np.trace(cov_a + cov_b - 2 * root)


images = load_digits().data / 16.0
np.random.shuffle(images)
train, test = images[:1400], images[1400:]
data = torch.tensor(train * 2 - 1, dtype=torch.float32)

net = VelocityNet()
ema = copy.deepcopy(net).requires_grad_(False)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
losses = []
for step in trange(N_STEPS, mininterval=5):
    x1 = data[torch.randint(len(data), (BATCH_SIZE,))]
    x0 = torch.randn_like(x1)
    t = torch.rand(BATCH_SIZE, 1)
    xt = (1 - t) * x0 + t * x1
    target = x1 - x0
    loss = F.mse_loss(net(xt, t), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for p_ema, p in zip(ema.parameters(), net.parameters()):
            p_ema.lerp_(p, 1 - EMA_DECAY)
    losses.append(loss.item())
    if (step + 1) % 300 == 0:
        print(f"step {step + 1}: loss {np.mean(losses[-300:]):.4f}")

samples = (sample(ema, 1000).numpy() + 1) / 2
print(f"FINAL frechet={frechet_distance(samples, test):.4f}")
