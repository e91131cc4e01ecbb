"""Embeddings of digits by triplets, drawn anew for each anchor in training and once for the validation; which of two pictures is the same digit?"""

import random

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import trainworthy

SEED = 0
data = load_digits()
pixels = torch.tensor(data.data / 16, dtype=torch.float32)
labels = torch.tensor(data.target)


class Triplets(Dataset):
    def __init__(self, rows, fixed=False):
        self.x, self.y = pixels[rows], labels[rows]
        self.of_class = {c: [i for i, y in enumerate(self.y.tolist()) if y == c] for c in range(10)}
        rng = random.Random(0)
        self.fixed = [self.draw(i, rng) for i in range(len(rows))] if fixed else None

    def __len__(self):
        return len(self.x)

    def draw(self, i, rng):
        c = int(self.y[i])
        positive = rng.choice([j for j in self.of_class[c] if j != i])
        negative = rng.choice(self.of_class[rng.choice([k for k in range(10) if k != c])])
        return positive, negative

    def __getitem__(self, i):
        p, n = self.fixed[i] if self.fixed else self.draw(i, random)
        return self.x[i], self.x[p], self.x[n]


train_set, val_set = Triplets(range(1300)), Triplets(range(1300, 1797), fixed=True)
MARGIN = 0.5


class Embedder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))

    def forward(self, x):
        return F.normalize(self.net(x), dim=1)


def triplet_loss(model, batch):
    anchor, positive, negative = (model(x) for x in batch)
    near, far = (anchor - positive).pow(2).sum(1), (anchor - negative).pow(2).sum(1)
    return F.relu(near - far + MARGIN).mean()


def train_epoch(model, optimizer, loader):
    model.train()
    for batch in loader:
        loss = triplet_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def triplet_accuracy(model, loader):
    model.eval()
    right = 0
    with torch.no_grad():
        for batch in loader:
            a, p, n = (model(x) for x in batch)
            right += ((a * p).sum(1) > (a * n).sum(1)).sum().item()
    return right / len(loader.dataset)


def make_script():
    model = Embedder()
    return trainworthy.Script(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
        train=train_set,
        val=val_set,
        batch_size=64,
        target="0",
        loss=triplet_loss,
        metric=triplet_accuracy,
        floor=0.5,
        train_loop=train_epoch,
    )


def main():
    torch.manual_seed(SEED)
    random.seed(SEED)
    model = Embedder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    train_loader, val_loader = DataLoader(train_set, 64, shuffle=True), DataLoader(val_set, 256)
    for epoch in range(30):
        train_epoch(model, optimizer, train_loader)
    print(f"FINAL accuracy={triplet_accuracy(model, val_loader):.4f}")


if __name__ == "__main__":
    main()
