"""Global forecaster: hourly load of 24 substations, the next 12 hours from 60 hours before; patch Transformer with known calendar."""

from functools import partial

import numpy as np
import torch
from torch import nn
from torch.nn.functional import l1_loss
from torch.utils.data import DataLoader, Dataset

CONTEXT, HORIZON, PATCH, STRIDE = 60, 12, 6, 7
SEED = 0
N_SERIES, N_HOURS = 24, 24 * 7 * 6


def simulate(rng):
    """(series, hour): load in kW; each substation has a level, a daily and a weekly shape, faults (NaN) and a common weather."""
    hour = np.arange(N_HOURS)
    weather = np.convolve(rng.normal(size=N_HOURS + 48), np.hanning(48), "valid")[:N_HOURS] / 4
    series = []
    for _ in range(N_SERIES):
        level, peak = np.exp(rng.normal(4, 1)), rng.uniform(5, 20)
        evening, phase = rng.uniform(0.2, 0.6), (hour % 24 - peak) / 24
        day = np.exp(np.cos(2 * np.pi * phase) * 2) / 5 + evening * np.cos(4 * np.pi * phase)
        weekend = np.where(hour // 24 % 7 >= 5, rng.uniform(0.5, 0.9), 1.0)
        noise = np.zeros(N_HOURS)
        for t in range(1, N_HOURS):
            noise[t] = 0.85 * noise[t - 1] + rng.normal(0, 0.06)
        values = level * (1.5 + day * weekend + 0.25 * weather + noise)
        for start in rng.integers(0, N_HOURS - 12, 14):
            values[start : start + rng.integers(2, 9)] = np.nan
        series.append(values)
    return np.stack(series)


def calendar(hours):
    day, week = 2 * np.pi * (hours % 24) / 24, 2 * np.pi * (hours % 168) / 168
    return np.stack([np.sin(day), np.cos(day), np.sin(week), np.cos(week), hours // 24 % 7 >= 5], axis=-1)


class Windows(Dataset):
    """Windows whose first forecast hour is in [start, end)."""

    def __init__(self, series, start, end, stride):
        self.series = series
        self.index = [(k, t) for k in range(len(series)) for t in range(start, end - HORIZON + 1, stride)]

    def __len__(self):
        return len(self.index)

    def __getitem__(self, i):
        k, t = self.index[i]
        past, future = self.series[k, t - CONTEXT : t], self.series[k, t : t + HORIZON]
        loc, scale = np.nanmean(past), np.nanstd(past) + 1e-3
        past, future = (past - loc) / scale, (future - loc) / scale
        observed = ~np.isnan(past)
        item = {
            "past": np.stack([np.nan_to_num(past), observed], axis=-1),
            "past_time": calendar(np.arange(t - CONTEXT, t)),
            "future_time": calendar(np.arange(t, t + HORIZON)),
            "mask": ~np.isnan(future),
            "future": np.nan_to_num(future),
            "scale": scale,
        }
        return {name: torch.tensor(value, dtype=torch.float32) for name, value in item.items()}


class PatchTransformer(nn.Module):
    def __init__(self, dim=48, heads=4, layers=2):
        super().__init__()
        self.patch = nn.Linear(PATCH * 7, dim)
        self.position = nn.Parameter(torch.randn(CONTEXT // PATCH, dim) * 0.02)
        self.query = nn.Linear(5, dim)
        self.step = nn.Parameter(torch.randn(HORIZON, dim) * 0.02)
        make = partial(nn.TransformerEncoderLayer, dim, heads, 2 * dim, 0.1, batch_first=True, norm_first=True)
        self.encoder = nn.Sequential(*[make() for _ in range(layers)])
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 1))

    def forward(self, past, past_time, future_time):
        x = torch.cat([past, past_time], dim=-1)
        x = x.reshape(len(x), CONTEXT // PATCH, -1)
        tokens = torch.cat([self.patch(x) + self.position, self.query(future_time) + self.step], dim=1)
        return self.head(self.encoder(tokens)[:, -HORIZON:]).squeeze(-1)


def forward(model, b):
    return model(b["past"], b["past_time"], b["future_time"])


def masked_mae(model, batch):
    error = l1_loss(forward(model, batch), batch["future"], reduction="none")
    return (error * batch["mask"]).sum() / batch["mask"].sum()


def fit_epoch(model, optimizer, loader, scheduler=None):
    model.train()
    for batch in loader:
        optimizer.zero_grad()
        masked_mae(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if scheduler:
            scheduler.step()


@torch.no_grad()
def validate(model, loader):
    """Absolute error in units of each window's own deviation."""
    model.eval()
    total = count = 0.0
    for batch in loader:
        error = (forward(model, batch) - batch["future"]).abs()
        total += (error * batch["mask"]).sum().item()
        count += batch["mask"].sum().item()
    return total / count


def get_sets():
    series = simulate(np.random.default_rng(7))
    split = N_HOURS - 24 * 7
    return Windows(series, CONTEXT, split, STRIDE), Windows(series, split, N_HOURS, HORIZON)


def make_script():
    import trainworthy

    train, val = get_sets()
    model = PatchTransformer()
    return trainworthy.Script(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=2e-3),
        train=train,
        val=val,
        batch_size=64,
        loss=masked_mae,
        metric=validate,
        train_loop=fit_epoch,
        target="future",
        count=lambda batch: batch["mask"].sum().item(),
        higher_is_better=False,
        floor=0.8,
    )


def main():
    torch.manual_seed(SEED)
    train, val = get_sets()
    train_loader, val_loader = DataLoader(train, 64, shuffle=True), DataLoader(val, 256)
    model = PatchTransformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    epochs = 5
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=epochs * len(train_loader))
    for epoch in range(epochs):
        fit_epoch(model, optimizer, train_loader, scheduler)
        print(f"epoch {epoch}: validation MAE {validate(model, val_loader):.4f}")
    print(f"FINAL mae={validate(model, val_loader):.4f}")
    return model, val


if __name__ == "__main__":
    main()
