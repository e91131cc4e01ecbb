"""A class-conditional DDPM of 8x8 digits; samples come from an exponential moving average of the weights."""

import copy
import math
import os

import numpy as np
import scipy.linalg
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

T = 200
EPOCHS = 60


def timestep_embedding(t, dim):
    freqs = torch.exp(-math.log(1000.0) * torch.arange(dim // 2) / (dim // 2))
    angles = t.float()[:, None] * freqs[None]
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.cond = nn.Linear(width, 2 * width)
        self.net = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))

    def forward(self, x, c):
        scale, shift = self.cond(c).chunk(2, dim=1)
        return x + self.net(self.norm(x) * (1 + scale) + shift)


class Denoiser(nn.Module):
    def __init__(self, width=192, blocks=3):
        super().__init__()
        self.width = width
        self.inp = nn.Linear(64, width)
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.label = nn.Embedding(10, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.out = nn.Linear(width, 64)

    def forward(self, x, t, y):
        c = F.silu(self.time(timestep_embedding(t, self.width)) + self.label(y))
        h = self.inp(x)
        for block in self.blocks:
            h = block(h, c)
        return self.out(h)


class Diffusion:
    def __init__(self):
        s = torch.linspace(0, 1, T + 1)
        bar = torch.cos((s + 0.008) / 1.008 * math.pi / 2) ** 2
        self.betas = (1 - bar[1:] / bar[:-1]).clamp(max=0.999)
        self.alphas = 1 - self.betas
        self.alpha_bars = torch.cumprod(self.alphas, dim=0)

    def q_sample(self, x0, t, noise):
        bar = self.alpha_bars[t][:, None]
        return bar.sqrt() * x0 + (1 - bar).sqrt() * noise

    @torch.no_grad()
    def sample(self, model, labels):
        x = torch.randn(len(labels), 64)
        for i in reversed(range(T)):
            t = torch.full((len(labels),), i)
            eps = model(x, t, labels)
            x0 = ((x - (1 - self.alpha_bars[i]).sqrt() * eps) / self.alpha_bars[i].sqrt()).clamp(-1, 1)
            bar_prev = self.alpha_bars[i - 1] if i > 0 else torch.tensor(1.0)
            mean = bar_prev.sqrt() * self.betas[i] * x0 + self.alphas[i].sqrt() * (1 - bar_prev) * x
            mean = mean / (1 - self.alpha_bars[i])
            var = self.betas[i] * (1 - bar_prev) / (1 - self.alpha_bars[i])
            x = mean + var.sqrt() * torch.randn_like(x) if i > 0 else mean
        return x


@torch.no_grad()
def update_ema(ema, model, decay):
    for p_ema, p in zip(ema.parameters(), model.parameters()):
        p_ema.lerp_(p, 1 - decay)


def frechet(a, b):
    diff = a.mean(0) - b.mean(0)
    cov_a, cov_b = (np.cov(v, rowvar=False) + 1e-6 * np.eye(v.shape[1]) for v in (a, b))
    root = scipy.linalg.sqrtm(cov_a @ cov_b).real
    return diff @ diff + np.trace(cov_a + cov_b - 2 * root)


def main():
    torch.manual_seed(int(os.environ.get("SEED", "0")))
    x, y = load_digits(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(x / 8 - 1, y, test_size=0.4, random_state=0, stratify=y)
    train_set = TensorDataset(torch.tensor(x_train, dtype=torch.float32), torch.tensor(y_train))
    loader = DataLoader(train_set, batch_size=64, shuffle=True, drop_last=True)
    diffusion, model = Diffusion(), Denoiser()
    ema = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    step = 0
    for epoch in range(EPOCHS):
        total = 0.0
        for x0, label in loader:
            t = torch.randint(0, T, (len(x0),))
            noise = torch.randn_like(x0)
            predicted = model(diffusion.q_sample(x0, t, noise), t, label)
            loss = F.mse_loss(predicted, noise)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            update_ema(ema, model, decay=min(0.995, (1 + step) / (10 + step)))
            total += loss.item()
        if epoch % 10 == 9:
            print(f"epoch {epoch} loss {total / len(loader):.4f}", flush=True)
    labels = torch.tensor(y_test)
    samples = diffusion.sample(ema.eval(), labels)
    # distance of pixels and labels together: a sample must be of its own class
    real = np.concatenate([x_test, 2 * np.eye(10)[y_test]], axis=1)
    fake = np.concatenate([samples.numpy(), 2 * np.eye(10)[y_test]], axis=1)
    print(f"frechet {frechet(fake, real):.4f}")


if __name__ == "__main__":
    main()
