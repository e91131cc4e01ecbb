"""Metric learning with triplets, a balanced sampler and a ReduceLROnPlateau."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler

torch.manual_seed(0)
raw = load_digits()
pictures, labels = torch.tensor(raw.data, dtype=torch.float32) / 16, torch.tensor(raw.target)


class Triplets(Dataset):
    def __init__(self, lo, hi):
        self.x, self.y = pictures[lo:hi], labels[lo:hi]

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        same = torch.where(self.y == self.y[i])[0]
        other = torch.where(self.y != self.y[i])[0]
        pick = lambda rows: rows[torch.randint(len(rows), (1,))].item()  # noqa: E731
        return self.x[i], self.x[pick(same)], self.x[pick(other)]


train_set, val_set = Triplets(0, 1400), Triplets(1400, 1797)
weights = 1.0 / torch.bincount(train_set.y)[train_set.y]
train_loader = DataLoader(train_set, 64, sampler=WeightedRandomSampler(weights, len(train_set)))
val_loader = DataLoader(val_set, 64)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))
criterion = nn.TripletMarginLoss(0.5)
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2)
for epoch in range(8):
    model.train()
    for a, p, n in train_loader:
        optimizer.zero_grad()
        loss = criterion(model(a), model(p), model(n))
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        val = sum(criterion(model(a), model(p), model(n)).item() for a, p, n in val_loader) / len(val_loader)
    scheduler.step(val)
    print(f"epoch {epoch} val {val:.4f}")
