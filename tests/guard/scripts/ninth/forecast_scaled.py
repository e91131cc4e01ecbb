"""Hourly demand, a day ahead of one hour: sliding windows of scaled features, a causal CNN, errors in MW."""

import copy

import numpy as np
import torch
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.utils.data import DataLoader, Dataset

SEED = 0
np.random.seed(SEED)
torch.manual_seed(SEED)

LOOKBACK = 24
HORIZON = 6
BATCH_SIZE = 64
N_EPOCHS = 8


def load_series(n=4000):
    """Temperature, wind and demand of one region (made up, with a slow growth)."""
    t = np.arange(n)
    weather = np.zeros(n)
    for i in range(1, n):
        weather[i] = 0.97 * weather[i - 1] + np.random.randn()
    temperature = 12 + 6 * np.sin(2 * np.pi * (t - 9) / 24) + weather
    wind = np.abs(8 + np.convolve(np.random.randn(n), np.ones(12) / 4, "same"))
    daily = 60 * np.sin(2 * np.pi * (t - 7) / 24) + 35 * np.sin(4 * np.pi * t / 24)
    demand = 500 + 0.03 * t + daily - 8 * np.roll(weather, 3) - 3 * wind + 6 * np.random.randn(n)
    return np.stack([temperature, wind, demand], axis=1)


class WindowDataset(Dataset):
    def __init__(self, series):
        self.series = torch.tensor(series, dtype=torch.float32)

    def __len__(self):
        return len(self.series) - LOOKBACK - HORIZON + 1

    def __getitem__(self, i):
        x = self.series[i : i + LOOKBACK]
        y = self.series[i + LOOKBACK + HORIZON - 1, -1]
        return x, y


class ConvForecaster(nn.Module):
    def __init__(self, n_features=3, hidden=32):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv1d(n_features, hidden, 3, padding=1),
            nn.ReLU(),
            nn.Conv1d(hidden, hidden, 3, padding=2, dilation=2),
            nn.ReLU(),
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(hidden * LOOKBACK, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x):
        x = x.permute(0, 2, 1)  # (batch, features, time)
        return self.head(self.conv(x)).squeeze(-1)


series = load_series()
train, val, test = series[:2600], series[2600:3200], series[3200:]
scaler = StandardScaler()
train_s = scaler.fit_transform(train)
val_s = scaler.transform(val)
test_s = scaler.transform(test)

train_loader = DataLoader(WindowDataset(train_s), batch_size=BATCH_SIZE, shuffle=True)
val_loader = DataLoader(WindowDataset(val_s), batch_size=256)
test_loader = DataLoader(WindowDataset(test_s), batch_size=256)


def to_mw(values):
    return values * scaler.scale_[-1] + scaler.mean_[-1]


def train_one_epoch(model, optimizer, criterion):
    model.train()
    total = 0.0
    for x, y in train_loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(x)
    return total / len(train_loader.dataset)


def predict(model, loader):
    model.eval()
    preds, targets = [], []
    with torch.no_grad():
        for x, y in loader:
            preds.append(model(x))
            targets.append(y)
    return torch.cat(preds).numpy(), torch.cat(targets).numpy()


def main():
    model = ConvForecaster()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=N_EPOCHS)
    best, best_state = float("inf"), None
    for epoch in range(N_EPOCHS):
        loss = train_one_epoch(model, optimizer, nn.MSELoss())
        scheduler.step()
        p, y = predict(model, val_loader)
        val_mse = float(np.mean((p - y) ** 2))
        if val_mse < best:
            best, best_state = val_mse, copy.deepcopy(model.state_dict())
        print(f"epoch {epoch + 1:02d} train mse {loss:.4f} val mse {val_mse:.4f}")
    model.load_state_dict(best_state)
    p, _ = predict(model, test_loader)
    truth = test[LOOKBACK + HORIZON - 1 :, -1]
    mae = np.mean(np.abs(to_mw(p) - truth))
    print(f"test MAE {mae:.2f} MW, of yesterday's value {np.mean(np.abs(truth[24:] - truth[:-24])):.2f} MW")
    print(f"FINAL mae={mae:.3f}")


if __name__ == "__main__":
    main()
