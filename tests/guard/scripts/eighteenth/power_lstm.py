"""Hourly power demand: an LSTM forecasts the next hour from the last two days of demand and temperature."""

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

SEED = 0
WINDOW = 48
torch.manual_seed(SEED)


def make_series(hours=24 * 130):
    rng = np.random.default_rng(3)
    t = np.arange(hours)
    weather = np.zeros(hours)
    for i in range(1, hours):
        weather[i] = 0.99 * weather[i - 1] + rng.normal(0, 0.5)
    temperature = 12 - 8 * np.cos(2 * np.pi * t / (24 * 260)) + 4 * np.sin(2 * np.pi * (t - 9) / 24) + weather
    day = np.exp(-((t % 24 - 9) ** 2) / 8) + 1.3 * np.exp(-((t % 24 - 19) ** 2) / 6)
    weekend = (t // 24 % 7 >= 5) * -40.0
    demand = 300 + 0.05 * t + 110 * day + weekend - 4 * (temperature - 15) + rng.normal(0, 6, hours)
    return demand.astype(np.float32), temperature.astype(np.float32)


def make_windows(values, window=WINDOW):
    xs, ys = [], []
    for i in range(len(values) - window):
        xs.append(values[i : i + window])
        ys.append(values[i + window, 0])
    return torch.tensor(np.array(xs)), torch.tensor(np.array(ys)).unsqueeze(1)


class Forecaster(nn.Module):
    def __init__(self, n_features=2, hidden=32):
        super().__init__()
        self.lstm = nn.LSTM(n_features, hidden, batch_first=True)
        self.fc = nn.Linear(hidden, 1)

    def forward(self, x):
        out, _ = self.lstm(x)
        return self.fc(out[:, -1])


demand, temperature = make_series()
series = np.stack([demand, temperature]).T
n_train = int(0.8 * len(series))
train_series, test_series = series[:n_train], series[n_train - WINDOW :]
mean, std = train_series.mean(axis=0), train_series.std(axis=0)
x_train, y_train = make_windows((train_series - mean) / std)
x_test, y_test = make_windows((test_series - mean) / std)
train_loader = DataLoader(TensorDataset(x_train, y_train), batch_size=64, shuffle=True)
test_loader = DataLoader(TensorDataset(x_test, y_test), batch_size=256, shuffle=False)

model = Forecaster()
loss_fn = nn.MSELoss()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)


def evaluate():
    """Mean absolute error in megawatts."""
    model.eval()
    predictions, targets = [], []
    with torch.no_grad():
        for x, y in test_loader:
            predictions.append(model(x))
            targets.append(y)
    predictions = torch.cat(predictions) * std[0] + mean[0]
    targets = torch.cat(targets) * std[0] + mean[0]
    return (predictions - targets).abs().mean().item()


for epoch in range(10):
    model.train()
    losses = []
    for x, y in train_loader:
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    scheduler.step()
    print(f"epoch {epoch + 1}: train mse {np.mean(losses):.4f}, test mae {evaluate():.2f} MW")

print(f"FINAL mae_mw={evaluate():.3f}")
