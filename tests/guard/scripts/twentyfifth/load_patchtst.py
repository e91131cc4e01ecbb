"""Forecast a day of hourly load from the week before, with a transformer over patches (PatchTST) and early stopping."""

import os
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn as nn
from sklearn.preprocessing import StandardScaler
from torch.utils.data import DataLoader, Dataset


@dataclass
class Config:
    seq_len: int = 168
    pred_len: int = 24
    patch_len: int = 12
    stride: int = 12
    d_model: int = 48
    n_heads: int = 4
    e_layers: int = 2
    dropout: float = 0.1
    batch_size: int = 64
    learning_rate: float = 2e-3
    train_epochs: int = 8
    patience: int = 3
    seed: int = int(os.environ.get("SEED", "0"))


def hourly_load(hours, rng):
    """Three meters in kW: daily and weekly cycles that drift, weather that persists, holidays."""
    t = np.arange(hours)
    weather = np.zeros(hours)
    for i in range(1, hours):
        weather[i] = 0.98 * weather[i - 1] + rng.normal(0, 0.2)
    holiday = np.repeat(rng.random(hours // 24 + 1) < 0.03, 24)[:hours]
    weekend = ((t // 24) % 7 >= 5) | holiday
    series = []
    for base, swing in ((300.0, 80.0), (120.0, 45.0), (800.0, 150.0)):
        day = np.sin(2 * np.pi * (t % 24 - 8 + rng.normal(0, 1)) / 24) + 0.4 * np.sin(4 * np.pi * (t % 24 - 5) / 24)
        level = base * (1 + 0.15 * t / hours)
        series.append(
            level
            + swing * day * np.where(weekend, 0.5, 1.0)
            + 0.25 * swing * weather
            + rng.normal(0, 0.06 * swing, hours)
        )
    return np.stack(series, axis=1).astype(np.float32)


class LoadDataset(Dataset):
    def __init__(self, data, cfg):
        self.data, self.cfg = torch.from_numpy(data).float(), cfg

    def __len__(self):
        return len(self.data) - self.cfg.seq_len - self.cfg.pred_len + 1

    def __getitem__(self, i):
        end = i + self.cfg.seq_len
        return self.data[i:end], self.data[end : end + self.cfg.pred_len]


class PatchTST(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.cfg, n_patches = cfg, (cfg.seq_len - cfg.patch_len) // cfg.stride + 1
        self.embed = nn.Linear(cfg.patch_len, cfg.d_model)
        self.position = nn.Parameter(0.02 * torch.randn(n_patches, cfg.d_model))
        layer = nn.TransformerEncoderLayer(
            cfg.d_model, cfg.n_heads, 2 * cfg.d_model, cfg.dropout, "gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, cfg.e_layers, enable_nested_tensor=False)
        self.head = nn.Linear(n_patches * cfg.d_model, cfg.pred_len)

    def forward(self, x):
        mean, std = x.mean(1, keepdim=True).detach(), x.std(1, keepdim=True).detach() + 1e-5
        x = ((x - mean) / std).permute(0, 2, 1)
        b, c, _ = x.shape
        patches = x.unfold(-1, self.cfg.patch_len, self.cfg.stride).reshape(b * c, -1, self.cfg.patch_len)
        h = self.encoder(self.embed(patches) + self.position)
        out = self.head(h.flatten(1)).view(b, c, -1).permute(0, 2, 1)
        return out * std + mean


class EarlyStopping:
    def __init__(self, patience):
        self.patience, self.counter, self.best, self.state, self.stop = patience, 0, None, None, False

    def __call__(self, val_loss, model):
        if self.best is None or val_loss < self.best:
            self.best, self.counter = val_loss, 0
            self.state = {k: v.clone() for k, v in model.state_dict().items()}
        else:
            self.counter += 1
            self.stop = self.counter >= self.patience


class Experiment:
    def __init__(self, cfg):
        self.cfg = cfg
        raw = hourly_load(24 * 7 * 20, np.random.default_rng(cfg.seed))
        n_train, n_val = int(0.7 * len(raw)), int(0.1 * len(raw))
        borders = ((0, n_train), (n_train - cfg.seq_len, n_train + n_val), (n_train + n_val - cfg.seq_len, len(raw)))
        self.scaler = StandardScaler().fit(raw[:n_train])
        data = self.scaler.transform(raw)
        self.train_set, self.val_set, self.test_set = (LoadDataset(data[a:b], cfg) for a, b in borders)
        self.model = PatchTST(cfg)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=cfg.learning_rate)
        self.criterion = nn.MSELoss()

    def loader(self, data, train=False):
        return DataLoader(data, self.cfg.batch_size, shuffle=train, drop_last=train)

    def train(self):
        stopping, loader = EarlyStopping(self.cfg.patience), self.loader(self.train_set, train=True)
        scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=1, gamma=0.7)
        for epoch in range(self.cfg.train_epochs):
            self.model.train()
            losses = []
            for batch_x, batch_y in loader:
                self.optimizer.zero_grad()
                loss = self.criterion(self.model(batch_x), batch_y)
                loss.backward()
                self.optimizer.step()
                losses.append(loss.item())
            scheduler.step()
            val_loss = self.validate(self.loader(self.val_set))
            print(f"epoch {epoch + 1} train {np.mean(losses):.4f} val {val_loss:.4f}")
            stopping(val_loss, self.model)
            if stopping.stop:
                break
        self.model.load_state_dict(stopping.state)

    @torch.no_grad()
    def validate(self, loader):
        self.model.eval()
        return np.average(
            [self.criterion(self.model(x), y).item() for x, y in loader], weights=[len(x) for x, _ in loader]
        )

    @torch.no_grad()
    def test(self):
        self.model.eval()
        predictions, targets = [], []
        for x, y in self.loader(self.test_set):
            predictions.append(self.model(x))
            targets.append(y)
        p, y = (self.scaler.inverse_transform(torch.cat(a).flatten(0, 1).numpy()) for a in (predictions, targets))
        return np.abs(p - y).mean()


if __name__ == "__main__":
    config = Config()
    torch.manual_seed(config.seed)
    experiment = Experiment(config)
    experiment.train()
    print(f"MAE {experiment.test():.4f} kW")
