"""A coordinate network after vsitzmann/siren: one picture, random pixels drawn by index, full-picture PSNR, no loader."""

import math

import numpy as np
import torch
from sklearn.datasets import load_sample_image
from torch import nn

torch.manual_seed(0)


class SineLayer(nn.Module):
    def __init__(self, in_features, out_features, is_first=False, omega_0=30):
        super().__init__()
        self.omega_0 = omega_0
        self.linear = nn.Linear(in_features, out_features)
        with torch.no_grad():
            bound = 1 / in_features if is_first else math.sqrt(6 / in_features) / omega_0
            self.linear.weight.uniform_(-bound, bound)

    def forward(self, input):
        return torch.sin(self.omega_0 * self.linear(input))


class Siren(nn.Module):
    def __init__(self, hidden=48, layers=2):
        super().__init__()
        net = [SineLayer(2, hidden, is_first=True), *(SineLayer(hidden, hidden) for _ in range(layers))]
        last = nn.Linear(hidden, 3)
        with torch.no_grad():
            last.weight.uniform_(-math.sqrt(6 / hidden) / 30, math.sqrt(6 / hidden) / 30)
        self.net = nn.Sequential(*net, last)

    def forward(self, coords):
        return self.net(coords)


def get_mgrid(height, width):
    ys, xs = torch.linspace(-1, 1, steps=height), torch.linspace(-1, 1, steps=width)
    return torch.stack(torch.meshgrid(ys, xs, indexing="ij"), dim=-1).reshape(-1, 2)


img = load_sample_image("flower.jpg")[::8, ::8].astype(np.float32) / 127.5 - 1
height, width, _ = img.shape
pixels = torch.from_numpy(img.reshape(-1, 3).copy())
coords = get_mgrid(height, width)
model = Siren()
optim = torch.optim.Adam(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optim, gamma=0.998)
total_steps, per_step = 600, 1024
for step in range(total_steps):
    sel = torch.randperm(coords.shape[0])[:per_step]
    rgb = model(coords[sel])
    loss = ((rgb - pixels[sel]) ** 2).mean()
    optim.zero_grad()
    loss.backward()
    optim.step()
    scheduler.step()
    if step % 200 == 0:
        with torch.no_grad():
            mse = ((model(coords) - pixels) ** 2).mean() / 4
        print(f"Step {step}, loss {loss.item():.5f}, PSNR {-10 * math.log10(mse):.2f}")
with torch.no_grad():
    mse = ((model(coords) - pixels) ** 2).mean() / 4
print(f"FINAL psnr={-10 * math.log10(mse):.3f}")
