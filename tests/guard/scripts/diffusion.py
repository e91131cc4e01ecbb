"""A small DDPM: noise prediction, a copy of the model as exponential average that samples, warm-up by step."""

import copy

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
T = 50
betas = torch.linspace(1e-4, 0.1, T)
alphas_bar = torch.cumprod(1 - betas, 0)


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Embedding(T, 32)
        self.net = nn.Sequential(nn.Linear(96, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 64))

    def forward(self, x, t):
        return self.net(torch.cat([x, self.time(t)], 1))


class EMA:
    def __init__(self, model, decay=0.99):
        self.model, self.decay = copy.deepcopy(model).eval().requires_grad_(False), decay

    @torch.no_grad()
    def update(self, model):
        for a, b in zip(self.model.parameters(), model.parameters()):
            a.lerp_(b, 1 - self.decay)


def sample(model, n):
    x = torch.randn(n, 64)
    for t in reversed(range(T)):
        steps = torch.full((n,), t)
        eps = model(x, steps)
        x = (x - betas[t] / (1 - alphas_bar[t]).sqrt() * eps) / (1 - betas[t]).sqrt()
        if t:
            x = x + betas[t].sqrt() * torch.randn_like(x)
    return x


def main():
    images = torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1
    loader = DataLoader(TensorDataset(images), batch_size=64, shuffle=True, drop_last=True)
    model = Denoiser()
    ema = EMA(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 100))
    for epoch in range(10):
        model.train()
        for (x0,) in loader:
            t = torch.randint(0, T, (len(x0),))
            noise = torch.randn_like(x0)
            a = alphas_bar[t][:, None]
            loss = F.mse_loss(model(a.sqrt() * x0 + (1 - a).sqrt() * noise, t), noise)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            ema.update(model)
        with torch.no_grad():
            pictures = sample(ema.model, 16)
        print(f"epoch {epoch} loss {loss.item():.4f} sample std {pictures.std():.3f}")


if __name__ == "__main__":
    main()
