"""Which movement? Clips of a three-axis sensor of unequal length; one scale for all axes, a transformer (time first) with a class token."""

import math

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import trainworthy

MOVES = ["rest", "walk", "run", "wave"]


def clip(rng, move):
    n = rng.integers(20, 49)
    t = np.arange(n) / 16
    gravity = np.array([0.0, 0.2, 9.8]) + rng.normal(0, 0.2, 3)
    size, hz = {0: (0.1, 1.0), 1: (1.5, 1.8), 2: (4.0, 2.7), 3: (2.5, 1.1)}[move]
    axes = np.array([1.0, 0.2, 0.1]) if move == 3 else np.array([0.3, 0.3, 1.0])
    wave = np.sin(2 * np.pi * (hz * rng.uniform(0.9, 1.1)) * t + rng.uniform(0, 6.28))[:, None]
    return (gravity + size * rng.uniform(0.7, 1.3) * wave * axes + rng.normal(0, 0.5, (n, 3))).astype(np.float32)


class Clips(Dataset):
    def __init__(self, n, seed, mean=None, std=None):
        rng = np.random.default_rng(seed)
        self.labels = rng.integers(0, len(MOVES), n)
        self.clips = [clip(rng, m) for m in self.labels]
        everything = np.concatenate(self.clips)
        self.mean = (
            everything.mean() if mean is None else mean
        )  # the axes share their unit: one scale keeps their ratios
        self.std = everything.std() if std is None else std

    def __len__(self):
        return len(self.clips)

    def __getitem__(self, i):
        return torch.from_numpy((self.clips[i] - self.mean) / self.std), int(self.labels[i])


def collate(samples):
    clips, labels = zip(*samples)
    lengths = torch.tensor([len(c) for c in clips])
    padded = nn.utils.rnn.pad_sequence(clips)  # (time, batch, 3)
    padding = torch.arange(len(padded))[None] >= lengths[:, None]
    return {"x": padded, "padding": padding, "y": torch.tensor(labels)}


class Encoder(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.embed = nn.Linear(3, dim)
        self.token = nn.Parameter(torch.randn(1, 1, dim) * 0.02)
        position = torch.arange(64)[:, None] * torch.exp(torch.arange(0, dim, 2) * (-math.log(1000.0) / dim))
        self.register_buffer("positions", torch.stack([position.sin(), position.cos()], -1).flatten(1)[:, None])
        layer = nn.TransformerEncoderLayer(dim, 4, 96, dropout=0.1)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(dim, len(MOVES))

    def forward(self, x, padding):
        h = self.embed(x)
        h = torch.cat([self.token.expand(-1, h.shape[1], -1), h])
        h = h + self.positions[: len(h)]
        padding = torch.cat([torch.zeros(len(padding), 1, dtype=torch.bool), padding], 1)
        h = self.layers(h, src_key_padding_mask=padding)
        return torch.log_softmax(self.head(h[0]), dim=-1)


train_set = Clips(1500, 0)
val_set = Clips(300, 1, train_set.mean, train_set.std)


def loss_of(model, batch):
    return nn.functional.nll_loss(model(batch["x"], batch["padding"]), batch["y"])


def train_epoch(model, optimizer, batches):
    model.train()
    for batch in batches:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@torch.no_grad()
def accuracy(model, loader):
    model.eval()
    right = 0
    for batch in loader:
        right += (model(batch["x"], batch["padding"]).argmax(-1) == batch["y"]).sum().item()
    return right / len(loader.dataset)


def make_script():
    model = Encoder()
    return trainworthy.Script(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        train=DataLoader(train_set, 32, shuffle=True, collate_fn=collate),
        val=DataLoader(val_set, 64, collate_fn=collate),
        loss=loss_of,
        metric=accuracy,
        train_loop=train_epoch,
        target="1",
        classes=MOVES,
    )


def main():
    torch.manual_seed(0)
    script = make_script()
    scheduler = torch.optim.lr_scheduler.StepLR(script.optimizer, 2, 0.5)
    for epoch in range(5):
        train_epoch(script.model, script.optimizer, script.train)
        scheduler.step()
        print(f"epoch {epoch}: accuracy {accuracy(script.model, script.val):.4f}")
    print(f"FINAL accuracy={accuracy(script.model, script.val):.4f}")


if __name__ == "__main__":
    main()
