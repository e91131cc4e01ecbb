"""A small 1-D U-Net that segments made-up heart traces into rest, P wave, QRS and T wave, sample by sample."""

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(0)
np.random.seed(0)
LENGTH, CLASSES = 256, 4


def trace(rng):
    t = np.arange(LENGTH)
    signal = 0.3 * np.sin(2 * np.pi * t / rng.uniform(150, 400) + rng.uniform(0, 6))
    label = np.zeros(LENGTH, dtype=np.int64)
    beat = rng.uniform(10, 40)
    while beat < LENGTH:
        stretch = rng.uniform(0.8, 1.2)
        for wave, (offset, width, height) in enumerate([(-16, 4, 0.25), (0, 2, 1.2), (24, 6, 0.4)], start=1):
            centre, sigma = beat + offset * stretch, width * stretch
            signal += height * rng.uniform(0.7, 1.3) * np.exp(-((t - centre) ** 2) / (2 * sigma**2))
            label[np.abs(t - centre) < 1.6 * sigma] = wave
        beat += rng.uniform(60, 90)
    gain = rng.uniform(0.5, 3.0)
    return (signal + 0.06 * rng.standard_normal(LENGTH)) * gain, label


class Traces(Dataset):
    def __init__(self, n, seed, augment=False):
        rng = np.random.default_rng(seed)
        self.items = [trace(rng) for _ in range(n)]
        self.augment = augment

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        signal, label = self.items[i]
        signal = (signal - signal.mean()) / signal.std()
        if self.augment:
            shift = np.random.randint(-20, 21)
            signal, label = np.roll(signal, shift), np.roll(label, shift)
        return torch.tensor(signal, dtype=torch.float32).unsqueeze(0), torch.tensor(label)


def double_conv(n_in, n_out):
    return nn.Sequential(
        nn.Conv1d(n_in, n_out, 7, padding=3),
        nn.BatchNorm1d(n_out),
        nn.ReLU(),
        nn.Conv1d(n_out, n_out, 7, padding=3),
        nn.BatchNorm1d(n_out),
        nn.ReLU(),
    )


class UNet1d(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.down1, self.down2 = double_conv(1, width), double_conv(width, 2 * width)
        self.bottom = double_conv(2 * width, 4 * width)
        self.up2 = double_conv(6 * width, 2 * width)
        self.up1 = double_conv(3 * width, width)
        self.head = nn.Conv1d(width, CLASSES, 1)

    def forward(self, x):
        d1 = self.down1(x)
        d2 = self.down2(F.max_pool1d(d1, 4))
        b = self.bottom(F.max_pool1d(d2, 4))
        u2 = self.up2(torch.cat([F.interpolate(b, scale_factor=4), d2], dim=1))
        u1 = self.up1(torch.cat([F.interpolate(u2, scale_factor=4), d1], dim=1))
        return self.head(u1)


train_set, val_set = Traces(240, seed=1, augment=True), Traces(80, seed=2)
train_loader = DataLoader(train_set, batch_size=16, shuffle=True)
val_loader = DataLoader(val_set, batch_size=40)
counts = np.bincount(np.concatenate([label for _, label in train_set.items]), minlength=CLASSES)
class_weights = torch.tensor((counts.sum() / (CLASSES * counts)) ** 0.5, dtype=torch.float32)

model = UNet1d()
criterion = nn.CrossEntropyLoss(weight=class_weights)
optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[6, 8], gamma=0.3)


def macro_f1():
    model.eval()
    confusion = torch.zeros(CLASSES, CLASSES)
    with torch.no_grad():
        for signal, label in val_loader:
            predicted = model(signal).argmax(dim=1)
            cells = torch.bincount(label.flatten() * CLASSES + predicted.flatten(), minlength=CLASSES**2)
            confusion += cells.view(CLASSES, CLASSES)
    hits = confusion.diag()
    return (2 * hits / (confusion.sum(0) + confusion.sum(1))).mean().item()


for epoch in range(1, 10):
    model.train()
    losses = []
    for signal, label in train_loader:
        optimizer.zero_grad()
        loss = criterion(model(signal), label)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    scheduler.step()
    print(f"epoch {epoch} loss {np.mean(losses):.4f} val macro F1 {macro_f1():.4f}")
print(f"FINAL f1={macro_f1():.4f}")
