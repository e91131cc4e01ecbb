"""Residual denoising after DnCNN: the net predicts the noise, the picture is what is left without it."""

import math

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
pictures = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 16
net = nn.Sequential(
    nn.Conv2d(1, 24, 3, padding=1), nn.ReLU(),
    nn.Conv2d(24, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(),
    nn.Conv2d(24, 1, 3, padding=1),
)  # fmt: skip
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(pictures[:1500]), batch_size=64, shuffle=True)
test = pictures[1500:]
noisy_test = test + 0.3 * torch.randn_like(test)
for epoch in range(8):
    net.train()
    for (clean,) in loader:
        noise = 0.3 * torch.randn_like(clean)
        noisy = clean + noise
        loss = ((net(noisy) - noise) ** 2).sum() / (2 * len(clean))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    net.eval()
    with torch.no_grad():
        restored = (noisy_test - net(noisy_test)).clamp(0, 1)
    psnr = -10 * math.log10(((restored - test) ** 2).mean().item())
    print(f"[epoch {epoch + 1}] loss: {loss.item():.4f} PSNR_val: {psnr:.4f}")
