"""Bicycle counts: the next 6 hours from the 48 before, by an LSTM on windows of a standardised series with calendar features."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import trainworthy

SEED = 0
CONTEXT, HORIZON = 48, 6


def make_counts(days=150):
    rng = np.random.default_rng(5)
    hour = np.arange(24 * days)
    clock, weekday = hour % 24, hour // 24 % 7
    commute = np.exp(-((clock - 8) ** 2) / 3) + np.exp(-((clock - 17) ** 2) / 5)
    leisure = np.exp(-((clock - 14) ** 2) / 18)
    rain = np.zeros(len(hour))
    for t in range(1, len(hour)):
        rain[t] = 0.93 * rain[t - 1] + rng.normal(0, 0.12)
    season = 1 + 0.3 * np.sin(2 * np.pi * hour / (24 * days))
    mean = season * (20 + 260 * np.where(weekday < 5, commute, 0.9 * leisure)) * np.exp(-rain)
    return rng.poisson(mean).astype(np.float32), clock, weekday


class Windows(Dataset):
    def __init__(self, series, features, start, end):
        self.series, self.features, self.start, self.end = series, features, start, end

    def __len__(self):
        return self.end - self.start - CONTEXT - HORIZON + 1

    def __getitem__(self, i):
        t = self.start + i + CONTEXT
        x = np.concatenate([self.series[t - CONTEXT : t, None], self.features[t - CONTEXT : t]], axis=1)
        y = self.series[t : t + HORIZON]
        return torch.from_numpy(x), torch.from_numpy(y)


def load():
    counts, clock, weekday = make_counts()
    angle = 2 * np.pi * clock / 24
    features = np.stack([np.sin(angle), np.cos(angle), weekday >= 5], axis=1).astype(np.float32)
    n_train, n_val = int(0.7 * len(counts)), int(0.85 * len(counts))
    mean, std = counts[:n_train].mean(), counts[:n_train].std()
    series = (counts - mean) / std
    return Windows(series, features, 0, n_train), Windows(series, features, n_train, n_val), std


train_set, val_set, unit = load()
train_loader = DataLoader(train_set, batch_size=64, shuffle=True, drop_last=True)
val_loader = DataLoader(val_set, batch_size=256)


class Forecaster(nn.Module):
    def __init__(self, hidden=48):
        super().__init__()
        self.lstm = nn.LSTM(4, hidden, batch_first=True)
        self.head = nn.Linear(hidden, HORIZON)

    def forward(self, x):
        out, _ = self.lstm(x)
        return self.head(out[:, -1])


criterion = nn.MSELoss()


def train_one_epoch(model, optimizer, loader):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def rmse(model, loader):
    """In bicycles per hour."""
    model.eval()
    total, n = 0.0, 0
    with torch.no_grad():
        for x, y in loader:
            total += ((model(x) - y) ** 2).sum().item()
            n += y.numel()
    return float((total / n) ** 0.5 * unit)


def make_script():
    model = Forecaster()
    return trainworthy.Script(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),
        train=train_loader,
        val=val_loader,
        loss=lambda model, batch: criterion(model(batch[0]), batch[1]),
        metric=rmse,
        train_loop=train_one_epoch,
        higher_is_better=False,
        floor=float(unit),
    )


def main():
    torch.manual_seed(SEED)
    model = Forecaster()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(4):
        train_one_epoch(model, optimizer, train_loader)
        print(f"epoch {epoch}: RMSE {rmse(model, val_loader):.1f} bicycles per hour")
    print(f"FINAL rmse={rmse(model, val_loader):.2f}")


if __name__ == "__main__":
    main()
