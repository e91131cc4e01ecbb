"""Are two handwritten digits the same number? A siamese net with the contrastive loss on fixed pairs of scikit-learn's digits."""

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import trainworthy

SEED = 0
MARGIN = 1.0


class Pairs(Dataset):
    """(picture, picture, 1 if they show the same digit)."""

    def __init__(self, images, labels, n, seed):
        rng = np.random.default_rng(seed)
        self.images = torch.from_numpy(images).float().unsqueeze(1) / 16
        first = rng.integers(0, len(labels), n)
        same = rng.random(n) < 0.5
        second = [rng.choice(np.flatnonzero((labels == labels[i]) == s)) for i, s in zip(first, same)]
        self.pairs = list(zip(first, second, same))

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, i):
        a, b, same = self.pairs[i]
        return self.images[a], self.images[b], torch.tensor(float(same))


class Embedder(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.head = nn.Linear(32 * 16, dim)

    def embed(self, x):
        return F.normalize(self.head(self.features(x)), dim=1)

    def forward(self, a, b):
        return (self.embed(a) - self.embed(b)).pow(2).sum(1).add(1e-8).sqrt()


def contrastive_loss(distance, same):
    return (same * distance**2 + (1 - same) * F.relu(MARGIN - distance) ** 2).mean()


def pair_loss(model, batch):
    a, b, same = batch
    return contrastive_loss(model(a, b), same)


digits = load_digits()
X_train, X_val, y_train, y_val = train_test_split(
    digits.images, digits.target, test_size=0.25, stratify=digits.target, random_state=0
)
train_set, val_set = Pairs(X_train, y_train, 3000, seed=1), Pairs(X_val, y_val, 800, seed=2)


def train_epoch(model, optimizer, loader):
    model.train()
    for batch in loader:
        optimizer.zero_grad()
        loss = pair_loss(model, batch)
        loss.backward()
        optimizer.step()


@torch.no_grad()
def verify(model, loader):
    """Share of pairs that a distance below half of the margin puts on the right side."""
    model.eval()
    right = total = 0
    for a, b, same in loader:
        right += ((model(a, b) < MARGIN / 2) == same.bool()).sum().item()
        total += len(same)
    return right / total


def make_script():
    model = Embedder()
    return trainworthy.Script(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4),
        train=train_set,
        val=val_set,
        batch_size=64,
        loss=pair_loss,
        metric=verify,
        train_loop=train_epoch,
        target="2",
        floor=0.5,
    )


def main():
    torch.manual_seed(SEED)
    model = Embedder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4)
    train_loader, val_loader = DataLoader(train_set, 64, shuffle=True), DataLoader(val_set, 200)
    for epoch in range(4):
        train_epoch(model, optimizer, train_loader)
        print(f"epoch {epoch}: {verify(model, val_loader):.3f} of pairs right")
    print(f"FINAL acc={verify(model, val_loader):.4f}")


if __name__ == "__main__":
    main()
