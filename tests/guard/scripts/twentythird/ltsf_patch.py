"""A forecaster as in the LTSF papers: 96 hours of seven channels in, 24 out. Patches, RevIN, early stopping, the best checkpoint is tested.

The series are drawn: a daily and a weekly course, a trend and autoregressive noise, 140 days by the hour.
"""

import argparse
import math
import os
import tempfile

import numpy as np
import torch
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.utils.data import DataLoader, Dataset

import trainworthy

parser = argparse.ArgumentParser()
parser.add_argument("--seq_len", type=int, default=96)
parser.add_argument("--pred_len", type=int, default=24)
parser.add_argument("--patch", type=int, default=12)
parser.add_argument("--d_model", type=int, default=48)
parser.add_argument("--dropout", type=float, default=0.1)
parser.add_argument("--learning_rate", type=float, default=2e-3)
parser.add_argument("--batch_size", type=int, default=32)
parser.add_argument("--train_epochs", type=int, default=5)
parser.add_argument("--patience", type=int, default=3)
BORDERS = {"train": (0, 2352), "val": (2352 - 96, 2352 + 504), "test": (2856 - 96, 3360)}


def draw_series(hours=3360, channels=7):
    rng = np.random.RandomState(2021)
    t = np.arange(hours)
    series = np.zeros((hours, channels))
    noise = np.zeros(channels)
    for i in range(hours):
        noise = 0.8 * noise + rng.randn(channels) * 0.25
        series[i] = noise
    for c in range(channels):
        day = np.sin(2 * np.pi * (t / 24 + rng.rand())) * (1 + 0.5 * (t // 24 % 7 < 5))
        half = np.sin(2 * np.pi * (t / 12 + rng.rand()))
        series[:, c] += day + 0.4 * half + 0.4 * np.sin(2 * np.pi * t / 168) + rng.rand() * t / 1500
        series[:, c] = series[:, c] * rng.uniform(2, 12) + rng.uniform(5, 40)
    return series


class Dataset_Hour(Dataset):
    def __init__(self, flag, seq_len, pred_len):
        data = draw_series()
        self.scaler = StandardScaler()
        start, end = BORDERS["train"]
        self.scaler.fit(data[start:end])
        start, end = BORDERS[flag]
        self.data = self.scaler.transform(data)[start:end].astype(np.float32)
        self.seq_len, self.pred_len = seq_len, pred_len

    def __len__(self):
        return len(self.data) - self.seq_len - self.pred_len + 1

    def __getitem__(self, index):
        middle = index + self.seq_len
        return self.data[index:middle], self.data[middle : middle + self.pred_len]


class Model(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.patch, self.stride = args.patch, args.patch // 2
        count = (args.seq_len - self.patch) // self.stride + 1
        self.embed = nn.Linear(self.patch, args.d_model)
        self.position = nn.Parameter(torch.randn(1, count, args.d_model) * 0.02)
        layer = nn.TransformerEncoderLayer(args.d_model, 4, 2 * args.d_model, args.dropout, "gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)
        self.head = nn.Linear(count * args.d_model, args.pred_len)

    def forward(self, x):
        mean = x.mean(1, keepdim=True)
        std = torch.sqrt(x.var(1, keepdim=True, unbiased=False) + 1e-5)
        x = (x - mean) / std
        batch, _, channels = x.shape
        x = x.transpose(1, 2).reshape(batch * channels, -1)
        patches = x.unfold(-1, self.patch, self.stride)
        hidden = self.encoder(self.embed(patches) + self.position)
        out = self.head(hidden.flatten(1)).reshape(batch, channels, -1).transpose(1, 2)
        return out * std + mean


class Exp:
    def __init__(self, args):
        self.args = args
        self.model = Model(args)
        self.criterion = nn.MSELoss()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=args.learning_rate)

    def loader(self, flag):
        data = Dataset_Hour(flag, self.args.seq_len, self.args.pred_len)
        return DataLoader(data, self.args.batch_size, shuffle=flag == "train", drop_last=flag == "train")

    def adjust_learning_rate(self, epoch):
        lr = self.args.learning_rate * 0.5 * (1 + math.cos(math.pi * epoch / self.args.train_epochs))
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def train_epoch(self, loader):
        self.model.train()
        for batch_x, batch_y in loader:
            self.optimizer.zero_grad()
            loss = self.criterion(self.model(batch_x), batch_y)
            loss.backward()
            self.optimizer.step()

    @torch.no_grad()
    def vali(self, loader):
        self.model.eval()
        preds, trues = zip(*[(self.model(x), y) for x, y in loader])
        return ((torch.cat(preds) - torch.cat(trues)) ** 2).mean().item()

    def train(self, path):
        loader, vali_loader = self.loader("train"), self.loader("val")
        best, waited = math.inf, 0
        for epoch in range(self.args.train_epochs):
            self.adjust_learning_rate(epoch)
            self.train_epoch(loader)
            vali_loss = self.vali(vali_loader)
            print(f"epoch {epoch} vali {vali_loss:.4f}")
            if vali_loss < best:
                best, waited = vali_loss, 0
                torch.save(self.model.state_dict(), path)
            else:
                waited += 1
                if waited >= self.args.patience:
                    break
        self.model.load_state_dict(torch.load(path))


def make_script():
    exp = Exp(parser.parse_args([]))
    return trainworthy.Script(
        model=exp.model,
        optimizer=exp.optimizer,
        train=exp.loader("train"),
        val=exp.loader("val"),
        loss=lambda model, batch: exp.criterion(model(batch[0]), batch[1]),
        metric=lambda model, loader: exp.vali(loader),
        train_loop=lambda model, optimizer, batches: exp.train_epoch(batches),
        higher_is_better=False,
        floor=1.0,
    )


def main():
    torch.manual_seed(int(os.environ.get("SEED", "0")))
    exp = Exp(parser.parse_args())
    with tempfile.TemporaryDirectory() as folder:
        exp.train(os.path.join(folder, "checkpoint.pth"))
    print(f"mse {exp.vali(exp.loader('test')):.4f}")


if __name__ == "__main__":
    main()
