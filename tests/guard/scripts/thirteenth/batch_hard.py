"""Metric learning: batches of P digits with K pictures each, batch-hard triplets with a soft margin; recall@1 on digits never trained."""

import random
from collections import defaultdict

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

P, K = 6, 8


class PKSampler(Sampler):
    def __init__(self, labels, batches):
        self.by_class = defaultdict(list)
        for i, label in enumerate(labels):
            self.by_class[int(label)].append(i)
        self.batches = batches

    def __len__(self):
        return self.batches

    def __iter__(self):
        for _ in range(self.batches):
            batch = []
            for c in random.sample(sorted(self.by_class), P):
                batch += random.sample(self.by_class[c], K)
            yield batch


class Embedder(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, dim),
        )  # fmt: skip

    def forward(self, x):
        return F.normalize(self.net(x), dim=-1)


def batch_hard(embeddings, labels):
    distance = (2 - 2 * embeddings @ embeddings.T).clamp(min=1e-8).sqrt()
    same = labels[:, None] == labels[None]
    furthest = (distance * same).max(1).values
    nearest = (distance + 10 * same).min(1).values
    return F.softplus(4 * (furthest - nearest)).mean()


def recall_at_1(model, loader):
    model.eval()
    embeddings, labels = [], []
    with torch.no_grad():
        for x, y in loader:
            embeddings.append(model(x))
            labels.append(y)
    embeddings, labels = torch.cat(embeddings), torch.cat(labels)
    similarity = embeddings @ embeddings.T
    similarity.fill_diagonal_(-2)
    return (labels[similarity.argmax(1)] == labels).float().mean().item()


torch.manual_seed(7)
random.seed(7)
data = load_digits()
pixels, y = torch.tensor(data.images).float().unsqueeze(1) / 8 - 1, torch.tensor(data.target)
x = torch.full((len(pixels), 1, 14, 14), -1.0)  # each digit is somewhere on a larger canvas
for i, (top, left) in enumerate(torch.randint(0, 7, (len(pixels), 2)).tolist()):
    x[i, :, top : top + 8, left : left + 8] = pixels[i]
seen = y < 7
train_set, test_set = TensorDataset(x[seen], y[seen]), TensorDataset(x[~seen], y[~seen])
train_loader = DataLoader(train_set, batch_sampler=PKSampler(y[seen], 60))
test_loader = DataLoader(test_set, batch_size=256)
model = Embedder()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.85)
print(f"untrained recall@1 {recall_at_1(model, test_loader):.4f}")
for epoch in range(8):
    model.train()
    running = 0.0
    for images, labels in train_loader:
        loss = batch_hard(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        running += loss.item()
    scheduler.step()
    print(f"epoch {epoch}: loss {running / len(train_loader):.4f} recall@1 {recall_at_1(model, test_loader):.4f}")
print(f"FINAL recall={recall_at_1(model, test_loader):.4f}")
