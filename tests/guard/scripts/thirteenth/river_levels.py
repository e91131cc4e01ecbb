# Levels of a river at three gauges, 8 steps ahead: GRU encoder and decoder, teacher forcing that fades out over the epochs.
import random

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

PAST, AHEAD = 32, 8


def simulate(n, seed=0):
    rng = np.random.default_rng(seed)
    rain = rng.gamma(0.15, 4.0, n)
    levels = np.zeros((n, 3))
    for t in range(1, n):
        inflow = rain[t]
        for g in range(3):
            levels[t, g] = 0.9 * levels[t - 1, g] + 0.12 * inflow
            inflow = levels[t - 1, g]
    season = 0.5 * np.sin(2 * np.pi * np.arange(n) / 365)[:, None]
    return (levels + season + rng.normal(0, 0.03, (n, 3))).astype(np.float32) * [1.0, 1.4, 2.1] + [2.0, 3.5, 5.0]


class Windows(Dataset):
    def __init__(self, series, stride):
        self.series, self.stride = torch.as_tensor(series, dtype=torch.float32), stride

    def __len__(self):
        return (len(self.series) - PAST - AHEAD) // self.stride + 1

    def __getitem__(self, i):
        start = i * self.stride
        return self.series[start : start + PAST], self.series[start + PAST : start + PAST + AHEAD]


class Seq2Seq(nn.Module):
    def __init__(self, channels=3, hidden=48):
        super().__init__()
        self.encoder = nn.GRU(channels, hidden, batch_first=True)
        self.decoder = nn.GRUCell(channels, hidden)
        self.out = nn.Linear(hidden, channels)

    def forward(self, past, future=None, teacher_forcing=0.0):
        _, state = self.encoder(past)
        state, last, outputs = state[0], past[:, -1], []
        for t in range(AHEAD):
            state = self.decoder(last, state)
            prediction = last + self.out(state)
            outputs.append(prediction)
            use_teacher = future is not None and random.random() < teacher_forcing
            last = future[:, t] if use_teacher else prediction
        return torch.stack(outputs, 1)


def main():
    torch.manual_seed(0)
    random.seed(0)
    series = simulate(4000)
    split = 3200
    mean, std = series[:split].mean(0), series[:split].std(0)
    scaled = (series - mean) / std
    train = DataLoader(Windows(scaled[:split], 1), batch_size=64, shuffle=True)
    test = DataLoader(Windows(scaled[split:], AHEAD), batch_size=64)
    model = Seq2Seq()
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    sched = torch.optim.lr_scheduler.StepLR(opt, step_size=3, gamma=0.5)
    epochs = 8
    for epoch in range(epochs):
        model.train()
        ratio = max(0.0, 1 - epoch / (epochs - 2))
        total = 0.0
        for past, future in train:
            opt.zero_grad()
            loss = nn.functional.mse_loss(model(past, future, ratio), future)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            total += loss.item() * len(past)
        sched.step()
        model.eval()
        with torch.no_grad():
            error = torch.cat([(model(past) - future).abs() for past, future in test]).mean((0, 1)) * torch.as_tensor(
                std
            )
        print(
            f"epoch {epoch + 1} loss {total / len(train.dataset):.4f} mae per gauge {[round(e, 3) for e in error.tolist()]}"
        )
    print(f"FINAL mae={error.mean().item():.4f}")


if __name__ == "__main__":
    main()
