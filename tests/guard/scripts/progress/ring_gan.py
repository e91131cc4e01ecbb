"""A GAN on eight points of a ring: both losses rise and fall, the critic's accuracy is to fall to a half."""

import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
angle = torch.randint(8, (6000,)) * math.pi / 4
real_data = torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(6000, 2)
loader = DataLoader(TensorDataset(real_data), batch_size=128, shuffle=True, drop_last=True)
G = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
D = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
opt_g = torch.optim.Adam(G.parameters(), 2e-4, betas=(0.5, 0.999))
opt_d = torch.optim.Adam(D.parameters(), 2e-4, betas=(0.5, 0.999))
bce = nn.BCEWithLogitsLoss()
for epoch in range(12):
    for (real,) in loader:
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        fake = G(torch.randn(len(real), 8))
        a, b = D(real), D(fake.detach())
        loss_d = bce(a, ones) + bce(b, zeros)
        opt_d.zero_grad()
        loss_d.backward()
        opt_d.step()
        loss_g = bce(D(fake), ones)
        opt_g.zero_grad()
        loss_g.backward()
        opt_g.step()
    accuracy = ((a > 0).float().mean() + (b < 0).float().mean()) / 2
    with torch.no_grad():
        spread = torch.cdist(real_data[:500], G(torch.randn(500, 8))).min(1).values.mean()
    print(f"epoch {epoch} loss_D {loss_d:.3f} loss_G {loss_g:.3f} D accuracy {accuracy:.3f} distance {spread:.3f}")
