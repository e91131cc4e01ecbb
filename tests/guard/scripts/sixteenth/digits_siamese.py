"""A siamese network on pairs of digits with the contrastive loss; a threshold on the distance tells same from different."""

import random

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

SEED = 0
random.seed(SEED)
np.random.seed(SEED)
torch.manual_seed(SEED)

data, target = load_digits(return_X_y=True)
data = (data / 16.0).astype("float32")
order = np.random.permutation(len(data))
train, test = order[:1300], order[1300:]


def create_pairs(x, y):
    """Positive and negative pairs in turn; the label is 1 for two digits of one class."""
    indices = [np.where(y == d)[0] for d in range(10)]
    pairs, labels = [], []
    n = min(len(i) for i in indices) - 1
    for d in range(10):
        for i in range(n):
            pairs.append([x[indices[d][i]], x[indices[d][i + 1]]])
            other = (d + random.randrange(1, 10)) % 10
            pairs.append([x[indices[d][i]], x[indices[other][i]]])
            labels += [1.0, 0.0]
    return torch.tensor(np.array(pairs)), torch.tensor(labels)


train_pairs, train_labels = create_pairs(data[train], target[train])
test_pairs, test_labels = create_pairs(data[test], target[test])


class SiameseNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Sequential(
            nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 16)
        )

    def forward(self, pair):
        return F.pairwise_distance(self.base(pair[:, 0]), self.base(pair[:, 1]))


def contrastive_loss(y_true, distance, margin=1.0):
    return torch.mean(y_true * distance**2 + (1 - y_true) * F.relu(margin - distance) ** 2)


model = SiameseNet()
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
for epoch in range(10):
    model.train()
    perm = torch.randperm(len(train_pairs))
    total = 0.0
    for i in range(0, len(perm), 64):
        idx = perm[i : i + 64]
        loss = contrastive_loss(train_labels[idx], model(train_pairs[idx]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    print(f"Epoch {epoch} - loss: {total / (len(perm) // 64):.4f}")

model.eval()
with torch.no_grad():
    same = (model(test_pairs) < 0.5).float()
print(f"FINAL accuracy={(same == test_labels).float().mean().item():.4f}")
