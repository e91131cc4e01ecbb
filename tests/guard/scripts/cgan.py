"""Conditional GAN on the digits, as the example scripts have it; a classifier says how many samples show the digit asked for."""

import argparse
import os

import torch
import torch.nn as nn
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--n_epochs", type=int, default=60)
parser.add_argument("--batch_size", type=int, default=64)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--b1", type=float, default=0.5)
parser.add_argument("--b2", type=float, default=0.999)
parser.add_argument("--latent_dim", type=int, default=24)
parser.add_argument("--n_classes", type=int, default=10)
opt = parser.parse_args()
os.makedirs("images", exist_ok=True)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.label_emb = nn.Embedding(opt.n_classes, opt.n_classes)
        self.model = nn.Sequential(
            nn.Linear(opt.latent_dim + opt.n_classes, 128),
            nn.BatchNorm1d(128),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Linear(128, 128),
            nn.BatchNorm1d(128),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Linear(128, 64),
            nn.Tanh(),
        )

    def forward(self, noise, labels):
        gen_input = torch.cat((self.label_emb(labels), noise), -1)
        return self.model(gen_input).view(-1, 1, 8, 8)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.label_embedding = nn.Embedding(opt.n_classes, opt.n_classes)
        self.model = nn.Sequential(
            nn.Linear(opt.n_classes + 64, 128),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Dropout(0.3),
            nn.Linear(128, 128),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Dropout(0.3),
            nn.Linear(128, 1),
        )

    def forward(self, img, labels):
        d_in = torch.cat((img.view(img.size(0), -1), self.label_embedding(labels)), -1)
        return self.model(d_in)


torch.manual_seed(0)
x, y = load_digits(return_X_y=True)
x = torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 16
x = (x - 0.5) / 0.5
y = torch.tensor(y)
dataloader = DataLoader(TensorDataset(x, y), batch_size=opt.batch_size, shuffle=True, drop_last=True)
judge = LogisticRegression(max_iter=300).fit(x.flatten(1).numpy(), y.numpy())

generator = Generator()
discriminator = Discriminator()
adversarial_loss = nn.BCEWithLogitsLoss()
optimizer_G = torch.optim.Adam(generator.parameters(), lr=opt.lr, betas=(opt.b1, opt.b2))
optimizer_D = torch.optim.Adam(discriminator.parameters(), lr=opt.lr, betas=(opt.b1, opt.b2))


@torch.no_grad()
def evaluate(n=50):
    """(share of samples that show their digit, distance of the classes' mean images from the true ones)"""
    generator.eval()
    labels = torch.arange(opt.n_classes).repeat_interleave(n)
    fake = generator(torch.randn(len(labels), opt.latent_dim), labels)
    generator.train()
    share = (judge.predict(fake.flatten(1).numpy()) == labels.numpy()).mean()
    gap = torch.stack([fake[labels == c].mean(0) - x[y == c].mean(0) for c in range(opt.n_classes)])
    return share, gap.square().mean().sqrt().item(), fake


for epoch in range(opt.n_epochs):
    for i, (real_imgs, labels) in enumerate(dataloader):
        n = real_imgs.shape[0]
        valid = torch.ones(n, 1)
        fake = torch.zeros(n, 1)

        # Train the generator
        optimizer_G.zero_grad()
        z = torch.randn(n, opt.latent_dim)
        gen_labels = torch.randint(0, opt.n_classes, (n,))
        gen_imgs = generator(z, gen_labels)
        g_loss = adversarial_loss(discriminator(gen_imgs, gen_labels), valid)
        g_loss.backward()
        optimizer_G.step()

        # Train the discriminator
        optimizer_D.zero_grad()
        d_real_loss = adversarial_loss(discriminator(real_imgs, labels), valid)
        d_fake_loss = adversarial_loss(discriminator(gen_imgs.detach(), gen_labels), fake)
        d_loss = (d_real_loss + d_fake_loss) / 2
        d_loss.backward()
        optimizer_D.step()

    if epoch % 10 == 9:
        share, gap, samples = evaluate()
        torch.save(samples, f"images/{epoch + 1}.pt")
        print(
            f"[Epoch {epoch + 1}/{opt.n_epochs}] [D {d_loss.item():.3f}] [G {g_loss.item():.3f}] right {share:.3f} gap {gap:.3f}"
        )
