"""A GAN that learns eight Gaussians on a ring; counted are the modes that it covers with points near them."""

import math

import torch
import torch.nn as nn

SEED = 0
torch.manual_seed(SEED)
centers = torch.tensor([[math.cos(i * math.pi / 4), math.sin(i * math.pi / 4)] for i in range(8)]) * 2.0


def real_samples(n):
    return centers[torch.randint(8, (n,))] + 0.1 * torch.randn(n, 2)


latent_dim, batch_size = 8, 128
netG = nn.Sequential(nn.Linear(latent_dim, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
netD = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
criterion = nn.BCEWithLogitsLoss()
optimizerD = torch.optim.Adam(netD.parameters(), lr=1e-3, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=1e-3, betas=(0.5, 0.999))
schedulerG = torch.optim.lr_scheduler.MultiStepLR(optimizerG, milestones=[1500], gamma=0.3)
schedulerD = torch.optim.lr_scheduler.MultiStepLR(optimizerD, milestones=[1500], gamma=0.3)
real_label, fake_label = torch.ones(batch_size, 1), torch.zeros(batch_size, 1)

for step in range(2500):
    # (1) Update D: maximize log(D(x)) + log(1 - D(G(z)))
    netD.zero_grad()
    real = real_samples(batch_size)
    errD_real = criterion(netD(real), real_label)
    errD_real.backward()
    noise = torch.randn(batch_size, latent_dim)
    fake = netG(noise)
    errD_fake = criterion(netD(fake.detach()), fake_label)
    errD_fake.backward()
    optimizerD.step()

    # (2) Update G: maximize log(D(G(z)))
    netG.zero_grad()
    output = netD(fake)
    errG = criterion(output, real_label)
    errG.backward()
    optimizerG.step()
    schedulerD.step()
    schedulerG.step()
    if step % 500 == 0:
        print(f"[{step}] Loss_D: {(errD_real + errD_fake).item():.3f} Loss_G: {errG.item():.3f}")

with torch.no_grad():
    samples = netG(torch.randn(2000, latent_dim))
distance = torch.cdist(samples, centers)
nearest = distance.argmin(1)
good = distance.min(1).values < 0.35
covered = sum(int((good & (nearest == k)).sum() > 20) for k in range(8))
print(f"modes covered: {covered} of 8, close to a mode: {good.float().mean():.3f}")
print(f"FINAL quality={(covered / 8 * good.float().mean()).item():.4f}")
