"""The shape of DCGAN: two models, two optimisers, gradients of one flow through the other, no evaluation metric."""

import torch
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x, y = load_digits(return_X_y=True)
dataset = TensorDataset(torch.tensor(x, dtype=torch.float32) / 8 - 1, torch.tensor(y))
dataloader = DataLoader(dataset, batch_size=64, shuffle=True)
netG = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh())
netD = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Dropout(0.2), nn.Linear(64, 1), nn.Sigmoid())
criterion = nn.BCELoss()
fixed_noise = torch.randn(64, 16)
optimizerD = optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
for epoch in range(12):
    for i, data in enumerate(dataloader):
        netD.zero_grad()
        real = data[0]
        label = torch.full((len(real),), 1.0)
        output = netD(real).view(-1)
        errD_real = criterion(output, label)
        errD_real.backward()
        noise = torch.randn(len(real), 16)
        fake = netG(noise)
        label.fill_(0.0)
        output = netD(fake.detach()).view(-1)
        errD_fake = criterion(output, label)
        errD_fake.backward()
        optimizerD.step()
        netG.zero_grad()
        label.fill_(1.0)
        output = netD(fake).view(-1)
        errG = criterion(output, label)
        errG.backward()
        optimizerG.step()
        if i % 20 == 0:
            print(f"[{epoch}][{i}] Loss_D: {(errD_real + errD_fake).item():.4f} Loss_G: {errG.item():.4f}")
    with torch.no_grad():
        torch.save(netG(fixed_noise), f"fake_{epoch:03d}.pt")
    torch.save(netG.state_dict(), f"netG_{epoch}.pth")
