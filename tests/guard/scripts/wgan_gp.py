"""WGAN-GP: five critic steps a generator step, a gradient penalty through autograd.grad, samples drawn by no_grad."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
loader = DataLoader(
    TensorDataset(torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1), 64, shuffle=True, drop_last=True
)
generator = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh())
critic = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
opt_g = torch.optim.Adam(generator.parameters(), 1e-4, betas=(0.0, 0.9))
opt_c = torch.optim.Adam(critic.parameters(), 1e-4, betas=(0.0, 0.9))


def penalty(real, fake):
    mix = torch.rand(len(real), 1)
    x = (mix * real + (1 - mix) * fake).requires_grad_(True)
    (grad,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
    return ((grad.norm(2, dim=1) - 1) ** 2).mean()


step = 0
for epoch in range(10):
    for (real,) in loader:
        with torch.no_grad():
            fake = generator(torch.randn(64, 16))
        loss_c = critic(fake).mean() - critic(real).mean() + 10 * penalty(real, fake)
        opt_c.zero_grad()
        loss_c.backward()
        opt_c.step()
        step += 1
        if step % 5 == 0:
            loss_g = -critic(generator(torch.randn(64, 16))).mean()
            opt_g.zero_grad()
            loss_g.backward()
            opt_g.step()
    print(f"epoch {epoch} critic {loss_c.item():.3f}")
