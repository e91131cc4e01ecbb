"""Fraud in a table, one payment in twenty: focal loss, the last bias starts at the prior, cosine per batch, average precision."""

import numpy as np
import torch
from sklearn.metrics import average_precision_score
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import trainworthy

RATE = 0.05


def payments(n, seed):
    rng = np.random.RandomState(seed)
    fraud = rng.rand(n) < RATE
    amount = np.exp(rng.normal(3.5 + 0.9 * fraud, 1.0))
    hour = np.where(fraud, rng.normal(2, 4, n) % 24, rng.normal(14, 5, n) % 24)
    since_last = rng.exponential(np.where(fraud, 3.0, 20.0))
    count_day = rng.poisson(np.where(fraud, 5, 2)).astype(float)
    foreign = (rng.rand(n) < np.where(fraud, 0.5, 0.05)).astype(float)
    return np.stack([amount, hour, since_last, count_day, foreign], 1), fraud.astype(np.float32)


class Payments(Dataset):
    def __init__(self, table, label, mean=None, std=None):
        table = table.copy()
        table[:, [0, 2]] = np.log1p(table[:, [0, 2]])
        hour = table[:, 1] * 2 * np.pi / 24
        table = np.column_stack([table[:, 0], np.sin(hour), np.cos(hour), table[:, 2:]])
        self.mean = table.mean(0) if mean is None else mean
        self.std = table.std(0) if std is None else std
        self.x = torch.tensor((table - self.mean) / self.std, dtype=torch.float32)
        self.y = torch.tensor(label)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


train_set = Payments(*payments(8000, 0))
val_set = Payments(*payments(2000, 1), mean=train_set.mean, std=train_set.std)


def make_model():
    model = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    nn.init.constant_(model[-1].bias, float(np.log(RATE / (1 - RATE))))
    return model


def focal_loss(logits, target, gamma=2.0, alpha=0.75):
    bce = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    p_t = torch.exp(-bce)
    weight = alpha * target + (1 - alpha) * (1 - target)
    return (weight * (1 - p_t) ** gamma * bce).mean()


def train_epoch(model, optimizer, batches, scheduler=None):
    model.train()
    for x, y in batches:
        loss = focal_loss(model(x).squeeze(1), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if scheduler:
            scheduler.step()


def average_precision(model, loader):
    model.eval()
    scores, labels = [], []
    with torch.no_grad():
        for x, y in loader:
            scores.append(model(x).squeeze(1).sigmoid())
            labels.append(y)
    return float(average_precision_score(torch.cat(labels).numpy(), torch.cat(scores).numpy()))


def make_script():
    model = make_model()
    return trainworthy.Script(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),
        train=train_set,
        val=val_set,
        batch_size=128,
        loss=lambda model, batch: focal_loss(model(batch[0]).squeeze(1), batch[1]),
        metric=average_precision,
        train_loop=train_epoch,
        floor=RATE,
    )


if __name__ == "__main__":
    torch.manual_seed(42)
    loader, val_loader = DataLoader(train_set, batch_size=128, shuffle=True), DataLoader(val_set, batch_size=1000)
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    epochs = 6
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs * len(loader), eta_min=1e-5)
    for epoch in range(epochs):
        train_epoch(model, optimizer, loader, scheduler)
        print(
            f"epoch {epoch} average precision {average_precision(model, val_loader):.4f} lr {scheduler.get_last_lr()[0]:.1e}"
        )
    print(f"FINAL ap={average_precision(model, val_loader):.4f}")
