"""A temporal convolutional network after locuslab/TCN, with quantile forecasts of the next steps of a load curve."""

import argparse

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser(description="Load forecasting")
parser.add_argument("--batch_size", type=int, default=64)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--lr", type=float, default=4e-3)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()
torch.manual_seed(args.seed)

SEQ_LEN, HORIZON = 48, 6
QUANTILES = (0.1, 0.5, 0.9)


def load_curve():
    rng = np.random.default_rng(3)
    t = np.arange(3000)
    day, week = np.sin(2 * np.pi * t / 24), np.sin(2 * np.pi * t / 168)
    return (50 + 10 * day * (1 + 0.4 * week) + 4 * week + rng.normal(size=3000) * (1.5 + 1.2 * (day > 0))).astype(
        np.float32
    )


def windows(values):
    pieces = np.lib.stride_tricks.sliding_window_view(values, SEQ_LEN + HORIZON).copy()
    return torch.from_numpy(pieces[:, None, :SEQ_LEN]), torch.from_numpy(pieces[:, SEQ_LEN:])


class Chomp1d(nn.Module):
    def __init__(self, chomp_size):
        super().__init__()
        self.chomp_size = chomp_size

    def forward(self, x):
        return x[:, :, : -self.chomp_size].contiguous()


class TemporalBlock(nn.Module):
    def __init__(self, n_inputs, n_outputs, kernel_size, dilation, dropout):
        super().__init__()
        padding = (kernel_size - 1) * dilation
        self.conv1 = weight_norm(nn.Conv1d(n_inputs, n_outputs, kernel_size, padding=padding, dilation=dilation))
        self.conv2 = weight_norm(nn.Conv1d(n_outputs, n_outputs, kernel_size, padding=padding, dilation=dilation))
        self.net = nn.Sequential(
            self.conv1, Chomp1d(padding), nn.ReLU(), nn.Dropout(dropout),
            self.conv2, Chomp1d(padding), nn.ReLU(), nn.Dropout(dropout),
        )  # fmt: skip
        self.downsample = nn.Conv1d(n_inputs, n_outputs, 1) if n_inputs != n_outputs else None

    def forward(self, x):
        res = x if self.downsample is None else self.downsample(x)
        return F.relu(self.net(x) + res)


class TCN(nn.Module):
    def __init__(self, num_channels, kernel_size=3, dropout=0.05):
        super().__init__()
        layers = []
        for i, n in enumerate(num_channels):
            layers.append(TemporalBlock(1 if i == 0 else num_channels[i - 1], n, kernel_size, 2**i, dropout))
        self.tcn = nn.Sequential(*layers)
        self.linear = nn.Linear(num_channels[-1], HORIZON * len(QUANTILES))

    def forward(self, x):
        return self.linear(self.tcn(x)[:, :, -1]).view(-1, HORIZON, len(QUANTILES))


def quantile_loss(preds, target):
    losses = []
    for i, q in enumerate(QUANTILES):
        errors = target - preds[:, :, i]
        losses.append(torch.max((q - 1) * errors, q * errors).unsqueeze(-1))
    return torch.mean(torch.sum(torch.cat(losses, dim=-1), dim=-1))


curve = load_curve()
train_part, test_part = curve[:2200], curve[2200:]
mean, std = train_part.mean(), train_part.std()
train_loader = DataLoader(
    TensorDataset(*windows((train_part - mean) / std)), batch_size=args.batch_size, shuffle=True, drop_last=True
)
X_test, _ = windows((test_part - mean) / std)
_, Y_test = windows(test_part)
model = TCN([16, 16, 16])
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)


def train(epoch):
    model.train()
    total_loss = 0
    for x, y in train_loader:
        optimizer.zero_grad()
        loss = quantile_loss(model(x), y)
        loss.backward()
        optimizer.step()
        total_loss += loss.item()
    print(f"Train Epoch: {epoch:2d} lr: {scheduler.get_last_lr()[0]:.5f} Loss: {total_loss / len(train_loader):.5f}")


def evaluate():
    model.eval()
    with torch.no_grad():
        forecast = (model(X_test) * std + mean).numpy()
    y = Y_test.numpy()
    pinball = [
        np.where(y >= forecast[..., i], q * (y - forecast[..., i]), (1 - q) * (forecast[..., i] - y)).mean()
        for i, q in enumerate(QUANTILES)
    ]
    inside = ((y > forecast[..., 0]) & (y < forecast[..., 2])).mean()
    print(f"Test set: pinball {np.mean(pinball):.4f} coverage of 80% interval {inside:.3f}")
    return np.mean(pinball)


for epoch in range(1, args.epochs + 1):
    train(epoch)
    tloss = evaluate()
    scheduler.step()
print(f"FINAL pinball={tloss:.4f}")
