"""Day-ahead load: a GRU reads four days of load and temperature and predicts the next 24 hours.

The series is generated (two years of hourly values). MAE in MW on the last part.
"""

import argparse

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

COLUMNS = ("load", "temperature")
DAY = 24


def generate_series(hours=10000, seed=0):
    rng = np.random.RandomState(seed)
    t = np.arange(hours)
    drift = np.zeros(hours)
    for i in range(1, hours):
        drift[i] = 0.99 * drift[i - 1] + rng.randn() * 0.25
    temperature = 12 - 9 * np.cos(2 * np.pi * t / (365 * 24)) - 4 * np.cos(2 * np.pi * (t - 3) / 24) + drift
    workday = ((t // 24) % 7 < 5).astype(float)
    hour = t % 24
    peaks = 160 * np.exp(-((hour - 8) ** 2) / 6) + 220 * np.exp(-((hour - 18) ** 2) / 10)
    load = 820 + peaks * (0.45 + 0.55 * workday) + 11 * np.abs(temperature - 17) + rng.randn(hours) * 12
    return np.stack([load, temperature], axis=1).astype(np.float32)


def calendar(first, count):
    """Hour of the day and day of the week, as angles. `first`: hours since the start of the series."""
    t = np.arange(first, first + count)
    day, week = 2 * np.pi * (t % 24) / 24, 2 * np.pi * ((t // 24) % 7) / 7
    return np.stack([np.sin(day), np.cos(day), np.sin(week), np.cos(week)], axis=1).astype(np.float32)


class StandardScaler:
    def fit(self, values):
        self.mean, self.std = values.mean(axis=0), values.std(axis=0)
        return self

    def transform(self, values):
        return (values - self.mean) / self.std

    def inverse(self, values, column):
        return values * self.std[column] + self.mean[column]


class WindowDataset(Dataset):
    def __init__(self, values, first_hour, history, horizon, stride=1):
        self.values = values
        self.time = calendar(first_hour, len(values))
        self.history, self.horizon, self.stride = history, horizon, stride

    def __len__(self):
        return (len(self.values) - self.history - self.horizon) // self.stride + 1

    def __getitem__(self, idx):
        begin = idx * self.stride
        now = begin + self.history
        past = np.concatenate([self.values[begin:now], self.time[begin:now]], axis=1)
        future = self.time[now : now + self.horizon]
        target = self.values[now : now + self.horizon, 0]
        return torch.from_numpy(past), torch.from_numpy(future), torch.from_numpy(target)


class Forecaster(nn.Module):
    def __init__(self, hidden=48):
        super().__init__()
        self.encoder = nn.GRU(len(COLUMNS) + 4, hidden, batch_first=True)
        self.decoder = nn.Sequential(nn.Linear(hidden + 4, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, past, future):
        _, state = self.encoder(past)
        state = state[-1].unsqueeze(1).expand(-1, future.size(1), -1)
        return self.decoder(torch.cat([state, future], dim=-1)).squeeze(-1)


def fit(model, loader, optimizer):
    model.train()
    mse, seen = 0.0, 0
    for past, future, target in loader:
        prediction = model(past, future)
        loss = nn.functional.mse_loss(prediction, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mse += loss.item() * past.size(0)
        seen += past.size(0)
    return mse / seen


def evaluate(model, loader, scaler):
    model.eval()
    errors = []
    with torch.no_grad():
        for past, future, target in loader:
            prediction = scaler.inverse(model(past, future).numpy(), column=0)
            actual = scaler.inverse(target.numpy(), column=0)
            errors.append(np.abs(prediction - actual).mean(axis=1))
    return float(np.concatenate(errors).mean())


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--history", type=int, default=96)
    ap.add_argument("--horizon", type=int, default=24)
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--batch-size", type=int, default=64)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--out", default="/tmp/load_forecast.pt")
    args = ap.parse_args()
    torch.manual_seed(args.seed)
    np.random.seed(args.seed)

    series = generate_series(seed=args.seed)
    cut = 8000 + 5  # measured from some hour of the day, not from midnight
    scaler = StandardScaler().fit(series[:cut])
    scaled = scaler.transform(series)
    train_set = WindowDataset(scaled[:cut], 0, args.history, args.horizon, stride=4)
    val_set = WindowDataset(scaled[cut:], cut, args.history, args.horizon, stride=12)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
    val_loader = DataLoader(val_set, batch_size=128)

    model = Forecaster()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
    best = float("inf")
    for epoch in range(1, args.epochs + 1):
        mse = fit(model, train_loader, optimizer)
        mae = evaluate(model, val_loader, scaler)
        plateau.step(mae)
        print(f"epoch {epoch}: train mse {mse:.4f}, val MAE {mae:.2f} MW")
        if mae < best:
            best = mae
            torch.save({"model": model.state_dict(), "mean": scaler.mean, "std": scaler.std}, args.out)
    print(f"FINAL mae={mae:.3f}")


if __name__ == "__main__":
    main()
