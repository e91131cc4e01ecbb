"""Conditional flow matching (straight paths) on the 8x8 digits, with classifier-free guidance and an average of the weights."""

import math
import os

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from tqdm import trange

NUM_CLASSES, DIM, HIDDEN = 10, 64, 192
STEPS, BATCH, LR, P_UNCOND, GUIDANCE, SAMPLE_STEPS = 2000, 128, 1e-3, 0.1, 1.0, 40


def timestep_embedding(t, dim=64, max_period=1000):
    half = dim // 2
    freqs = torch.exp(-math.log(max_period) * torch.arange(half) / half)
    args = 1000 * t[:, None] * freqs[None]
    return torch.cat([args.cos(), args.sin()], dim=-1)


class ResBlock(nn.Module):
    def __init__(self, dim, cond_dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim, elementwise_affine=False)
        self.modulation = nn.Linear(cond_dim, 3 * dim)
        self.mlp = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, x, cond):
        shift, scale, gate = self.modulation(cond).chunk(3, dim=-1)
        return x + gate * self.mlp(self.norm(x) * (1 + scale) + shift)


class VelocityNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(64, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, HIDDEN))
        self.label = nn.Embedding(NUM_CLASSES + 1, HIDDEN)
        self.inp = nn.Linear(DIM, HIDDEN)
        self.blocks = nn.ModuleList(ResBlock(HIDDEN, HIDDEN) for _ in range(3))
        self.out = nn.Linear(HIDDEN, DIM)

    def forward(self, x, t, y):
        cond = F.silu(self.time(timestep_embedding(t)) + self.label(y))
        h = self.inp(x)
        for block in self.blocks:
            h = block(h, cond)
        return self.out(h)


class FlowMatching:
    def loss(self, model, x1, y):
        x0 = torch.randn_like(x1)
        t = torch.rand(len(x1))
        xt = (1 - t[:, None]) * x0 + t[:, None] * x1
        drop = torch.rand(len(y)) < P_UNCOND
        y = torch.where(drop, torch.full_like(y, NUM_CLASSES), y)
        return F.mse_loss(model(xt, t, y), x1 - x0)

    @torch.no_grad()
    def sample(self, model, y, guidance=GUIDANCE, steps=SAMPLE_STEPS):
        x = torch.randn(len(y), DIM)
        null = torch.full_like(y, NUM_CLASSES)
        for i in range(steps):
            t = torch.full((len(y),), (i + 0.5) / steps)
            v_cond, v_null = model(x, t, y), model(x, t, null)
            x = x + (v_null + guidance * (v_cond - v_null)) / steps
        return x


def energy_distance(a, b):
    def mean_dist(p, q):
        return torch.cdist(p, q).mean()

    return 2 * mean_dist(a, b) - mean_dist(a, a) - mean_dist(b, b)


def evaluate(model, test_x, test_y, judge):
    """Energy distance between samples and held-out images of each class, and the share that a classifier reads as its class."""
    model.eval()
    y = torch.arange(NUM_CLASSES).repeat_interleave(150)
    samples = FlowMatching().sample(model, y)
    distance = np.mean([energy_distance(samples[y == c], test_x[test_y == c]).item() for c in range(NUM_CLASSES)])
    return distance, judge.score(samples.numpy(), y.numpy())


def main():
    seed = int(os.environ.get("SEED", "0"))
    torch.manual_seed(seed)
    digits = load_digits()
    order = np.random.default_rng(seed).permutation(len(digits.data))
    x = torch.tensor(digits.data[order] / 8 - 1, dtype=torch.float32)
    y = torch.tensor(digits.target[order])
    train_x, train_y, test_x, test_y = x[:1200], y[:1200], x[1200:], y[1200:]
    judge = LogisticRegression(max_iter=500).fit(train_x.numpy(), train_y.numpy())

    model, flow = VelocityNet(), FlowMatching()
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.995))
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    bar = trange(STEPS, mininterval=5)
    for step in bar:
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, (step + 1) / 100)
        i = torch.randint(len(train_x), (BATCH,))
        loss = flow.loss(model, train_x[i], train_y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update_parameters(model)
        if step % 100 == 0:
            bar.set_postfix(loss=f"{loss.item():.4f}")
    distance, share = evaluate(ema, test_x, test_y, judge)
    print(f"read as their class {share:.4f}")
    print(f"energy distance {distance:.4f}")


if __name__ == "__main__":
    main()
