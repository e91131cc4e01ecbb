"""Density estimation with RealNVP (Dinh et al., 2017) on the 8x8 digits, in bits per dimension."""

import argparse
import math
import os

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.distributions import Normal

LEVELS, ALPHA, DIM = 17, 0.05, 64


def preprocess(x):
    """Uniform dequantisation and logit. Returns the transformed pixels and the log-determinant of the change."""
    x = (x + torch.rand_like(x)) / LEVELS
    p = ALPHA + (1 - 2 * ALPHA) * x
    y = torch.log(p) - torch.log1p(-p)
    log_det = -torch.log(p) - torch.log1p(-p) + math.log(1 - 2 * ALPHA) - math.log(LEVELS)
    return y, log_det.sum(dim=1)


class CouplingLayer(nn.Module):
    def __init__(self, mask, hidden):
        super().__init__()
        self.register_buffer("mask", mask)
        self.scale = nn.Parameter(torch.ones(DIM))
        self.net = nn.Sequential(
            nn.Linear(DIM, hidden),
            nn.LeakyReLU(0.2),
            nn.Linear(hidden, hidden),
            nn.LeakyReLU(0.2),
            nn.Linear(hidden, 2 * DIM),
        )
        nn.init.zeros_(self.net[-1].weight)
        nn.init.zeros_(self.net[-1].bias)

    def st(self, kept):
        s, t = self.net(kept).chunk(2, dim=1)
        s = self.scale * torch.tanh(s)
        s, t = (1 - self.mask) * s, (1 - self.mask) * t
        return s, t

    def forward(self, x):
        s, t = self.st(self.mask * x)
        return x * s.exp() + t, s.sum(dim=1)

    def inverse(self, z):
        s, t = self.st(self.mask * z)
        return (z - t) * (-s).exp()


class RealNVP(nn.Module):
    def __init__(self, num_layers, hidden):
        super().__init__()
        grid = torch.arange(8)
        mask = ((grid[:, None] + grid[None]) % 2).float().flatten()
        self.layers = nn.ModuleList(CouplingLayer(mask if i % 2 == 0 else 1 - mask, hidden) for i in range(num_layers))
        self.prior = Normal(0.0, 1.0)

    def log_prob(self, x):
        z, log_det = preprocess(x)
        for layer in self.layers:
            z, ld = layer(z)
            log_det = log_det + ld
        return self.prior.log_prob(z).sum(dim=1) + log_det

    @torch.no_grad()
    def sample(self, n):
        z = self.prior.sample((n, DIM))
        for layer in reversed(self.layers):
            z = layer.inverse(z)
        return ((torch.sigmoid(z) - ALPHA) / (1 - 2 * ALPHA) * LEVELS).floor().clamp(0, LEVELS - 1)


@torch.no_grad()
def bits_per_dim(model, x, repeats=5):
    model.eval()
    nll = -torch.stack([model.log_prob(x) for _ in range(repeats)]).mean()
    return nll.item() / (DIM * math.log(2))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=96)
    args = parser.parse_args()
    seed = int(os.environ.get("SEED", "0"))
    torch.manual_seed(seed)
    data = load_digits().data
    data = torch.tensor(data[np.random.default_rng(seed).permutation(len(data))], dtype=torch.float32)
    train_x, val_x, test_x = data[:1200], data[1200:1400], data[1400:]

    model = RealNVP(args.layers, args.hidden)
    optimizer = optim.AdamW(model.parameters(), lr=args.lr, weight_decay=1e-2)
    scheduler = optim.lr_scheduler.MultiStepLR(optimizer, [args.epochs // 2, args.epochs * 3 // 4], gamma=0.3)
    best, best_weights = float("inf"), None
    for epoch in range(args.epochs):
        model.train()
        for index in torch.randperm(len(train_x)).split(args.batch_size):
            loss = -model.log_prob(train_x[index]).mean() / (DIM * math.log(2))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        scheduler.step()
        val = bits_per_dim(model, val_x)
        if val < best:
            best, best_weights = val, {k: v.clone() for k, v in model.state_dict().items()}
        if epoch % 10 == 9:
            print(f"epoch {epoch + 1} train {loss.item():.4f} val {val:.4f}")
    model.load_state_dict(best_weights)
    print(f"mean grey level of samples {model.sample(500).mean():.2f}, of the data {train_x.mean():.2f}")
    print(f"bits per dimension {bits_per_dim(model, test_x):.4f}")


if __name__ == "__main__":
    main()
