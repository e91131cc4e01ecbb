"""Barlow Twins on digits: two shifted and noisy views, cross-correlation near the identity, a linear probe by least squares."""

import torch
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset


def augment(image):
    dy, dx = torch.randint(-1, 2, (2,)).tolist()
    image = torch.roll(image, (dy, dx), (-2, -1))
    image = image * (0.6 + 0.8 * torch.rand(()))
    mask = (torch.rand(image.shape) > 0.1).float()
    return image * mask + 0.05 * torch.randn(image.shape)


class TwoViews(Dataset):
    def __init__(self, images):
        self.images = images

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return augment(self.images[i]), augment(self.images[i])


class Twins(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.BatchNorm2d(64), nn.ReLU(),
            nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        )  # fmt: skip
        self.projector = nn.Sequential(
            nn.Linear(256, 128, bias=False), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 128, bias=False)
        )
        self.bn = nn.BatchNorm1d(128, affine=False)

    def forward(self, a, b, lambd=0.01):
        za, zb = self.bn(self.projector(self.encoder(a))), self.bn(self.projector(self.encoder(b)))
        c = za.T @ zb / len(a)
        on = (c.diagonal() - 1).pow(2).sum()
        off = c.pow(2).sum() - c.diagonal().pow(2).sum()
        return on + lambd * off


@torch.no_grad()
def probe(encoder, x, y, x_test, y_test):
    encoder.eval()
    f, g = encoder(x), encoder(x_test)
    mean, std = f.mean(0), f.std(0) + 1e-5
    f, g = (f - mean) / std, (g - mean) / std
    w = torch.linalg.solve(f.T @ f + 10 * torch.eye(f.shape[1]), f.T @ nn.functional.one_hot(y, 10).float())
    return ((g @ w).argmax(1) == y_test).float().mean().item()


def main():
    torch.manual_seed(0)
    data = load_digits()
    x, y = torch.tensor(data.images).float().unsqueeze(1) / 16, torch.tensor(data.target)
    idx = torch.randperm(len(x))
    pool, test = idx[:1400], idx[1400:]
    few = pool[:200]
    loader = DataLoader(TwoViews(x[pool]), batch_size=128, shuffle=True, drop_last=True)
    model = Twins()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-4)
    epochs = 12
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(loader))
    print(f"untrained probe {probe(model.encoder, x[few], y[few], x[test], y[test]):.4f}")
    for epoch in range(epochs):
        model.train()
        for a, b in loader:
            loss = model(a, b)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
        print(f"epoch {epoch} loss {loss.item():.2f}")
    print(f"FINAL probe={probe(model.encoder, x[few], y[few], x[test], y[test]):.4f}")


if __name__ == "__main__":
    main()
