"""A GAN on scikit-learn's digits, checked as a loop. Reports the Frechet distance of 32 principal components, drawn and real."""

import numpy as np
import torch
from scipy.linalg import sqrtm
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainworthy

SEED = 0
LATENT = 24

pixels = load_digits().data.astype(np.float32) / 8 - 1  # -1 to 1
train_set = TensorDataset(torch.from_numpy(pixels[:1400]))
projection = PCA(32, random_state=0).fit(pixels[:1400])
real = projection.transform(pixels[1400:])
criterion = nn.BCEWithLogitsLoss()


def make_generator():
    return nn.Sequential(
        nn.Linear(LATENT, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 128), nn.BatchNorm1d(128), nn.ReLU(),
        nn.Linear(128, 64), nn.Tanh(),
    )  # fmt: skip


def make_discriminator():
    return nn.Sequential(
        nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Dropout(0.2), nn.Linear(128, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1)
    )


def train_epoch(G, D, opt_g, opt_d, loader):
    G.train()
    D.train()
    for (x,) in loader:
        ones, zeros = torch.ones(len(x), 1), torch.zeros(len(x), 1)
        fake = G(torch.randn(len(x), LATENT))

        opt_d.zero_grad()
        loss_d = criterion(D(x), 0.9 * ones) + criterion(D(fake.detach()), zeros)
        loss_d.backward()
        opt_d.step()

        opt_g.zero_grad()
        loss_g = criterion(D(fake), ones)
        loss_g.backward()
        opt_g.step()


@torch.no_grad()
def frechet(G):
    G.eval()
    drawn = projection.transform(G(torch.randn(1000, LATENT, generator=torch.Generator().manual_seed(3))).numpy())
    a, b = np.cov(real.T), np.cov(drawn.T)
    return float(((real.mean(0) - drawn.mean(0)) ** 2).sum() + np.trace(a + b - 2 * np.real(sqrtm(a @ b))))


def make_script():
    G, D = make_generator(), make_discriminator()
    opt_g = torch.optim.Adam(G.parameters(), lr=5e-4, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(D.parameters(), lr=5e-4, betas=(0.5, 0.999))
    return trainworthy.Loop(
        models={"generator": G, "discriminator": D},
        optimizers={"generator": opt_g, "discriminator": opt_d},
        batches=DataLoader(train_set, 64, shuffle=True, drop_last=True),
        run=lambda batches: train_epoch(G, D, opt_g, opt_d, batches),
        evaluate=lambda: frechet(G),
        higher_is_better=False,
    )


def main():
    torch.manual_seed(SEED)
    loop = make_script()
    for epoch in range(60):
        loop.run(loop.batches)
        if epoch % 15 == 14:
            print(f"epoch {epoch + 1}: distance {loop.evaluate():.2f}")
    print(f"FINAL fd={loop.evaluate():.3f}")


if __name__ == "__main__":
    main()
