"""A GAN with spectral norm and the hinge loss on 8 x 8 digits: two critic steps per generator step, samples from averaged weights."""

import copy

import torch
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import DataLoader, TensorDataset

Z = 32
torch.manual_seed(0)
pixels = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 8 - 1
loader = DataLoader(TensorDataset(pixels), batch_size=64, shuffle=True, drop_last=True)

G = nn.Sequential(
    nn.Linear(Z, 64 * 4), nn.BatchNorm1d(64 * 4), nn.ReLU(), nn.Unflatten(1, (64, 2, 2)),
    nn.ConvTranspose2d(64, 48, 4, 2, 1), nn.BatchNorm2d(48), nn.ReLU(),
    nn.ConvTranspose2d(48, 24, 4, 2, 1), nn.BatchNorm2d(24), nn.ReLU(),
    nn.Conv2d(24, 1, 3, padding=1), nn.Tanh(),
)  # fmt: skip
D = nn.Sequential(
    spectral_norm(nn.Conv2d(1, 32, 3, 1, 1)), nn.LeakyReLU(0.1),
    spectral_norm(nn.Conv2d(32, 48, 4, 2, 1)), nn.LeakyReLU(0.1),
    spectral_norm(nn.Conv2d(48, 64, 4, 2, 1)), nn.LeakyReLU(0.1),
    nn.Flatten(), spectral_norm(nn.Linear(256, 1)),
)  # fmt: skip
G_ema = copy.deepcopy(G).eval().requires_grad_(False)
opt_g = torch.optim.Adam(G.parameters(), lr=4e-4, betas=(0.0, 0.9))
opt_d = torch.optim.Adam(D.parameters(), lr=8e-4, betas=(0.0, 0.9))

mean = pixels.flatten(1).mean(0)
_, _, basis = torch.linalg.svd(pixels.flatten(1) - mean, full_matrices=False)


def distance():
    """Difference of means and deviations of 16 principal components, samples against digits."""
    with torch.no_grad():
        drawn = G_ema(torch.randn(1000, Z)).flatten(1)
    a, b = (drawn - mean) @ basis[:16].T, (pixels.flatten(1) - mean) @ basis[:16].T
    return ((a.mean(0) - b.mean(0)).norm() + (a.std(0) - b.std(0)).norm()).item()


def ema_update(decay):
    with torch.no_grad():
        for a, b in zip(G_ema.parameters(), G.parameters()):
            a.lerp_(b, 1 - decay)
        for a, b in zip(G_ema.buffers(), G.buffers()):
            a.copy_(b)


print(f"before: distance {distance():.3f}")
iteration = 0
for epoch in range(30):
    for (real,) in loader:
        fake = G(torch.randn(len(real), Z)).detach()
        loss_d = (1 - D(real)).relu().mean() + (1 + D(fake)).relu().mean()
        opt_d.zero_grad()
        loss_d.backward()
        opt_d.step()
        iteration += 1
        if iteration % 2 == 0:
            loss_g = -D(G(torch.randn(len(real), Z))).mean()
            opt_g.zero_grad()
            loss_g.backward()
            opt_g.step()
            ema_update(0.98)
    if epoch % 5 == 4:
        print(f"epoch {epoch + 1}: D {loss_d.item():.3f} G {loss_g.item():.3f} distance {distance():.3f}")
print(f"FINAL distance={distance():.4f}")
