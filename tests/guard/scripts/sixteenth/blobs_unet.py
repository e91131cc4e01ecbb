"""Segmenting bright cells in noisy pictures with a small U-Net; flips as augmentation, Dice on held-out pictures."""

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

SEED = 0
torch.manual_seed(SEED)
rng = np.random.RandomState(SEED)
SIZE = 32


def make_picture():
    yy, xx = np.mgrid[:SIZE, :SIZE]
    mask = np.zeros((SIZE, SIZE), dtype=np.float32)
    for _ in range(rng.randint(2, 5)):
        cy, cx = rng.randint(3, SIZE - 3, size=2)
        ry, rx = rng.randint(3, 6, size=2)
        mask[((yy - cy) / ry) ** 2 + ((xx - cx) / rx) ** 2 <= 1] = 1
    shade = np.linspace(0, 0.6, SIZE)[None, :]
    picture = 0.7 * mask + shade + rng.normal(0, 0.25, size=(SIZE, SIZE))
    return np.stack([picture, shade + 0.3 * rng.randn(SIZE, SIZE)], axis=-1).astype(np.float32), mask


class Cells(Dataset):
    def __init__(self, n, augment):
        self.items = [make_picture() for _ in range(n)]
        self.augment = augment

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        image, mask = self.items[index]
        if self.augment:
            if np.random.rand() < 0.5:
                image, mask = image[:, ::-1], mask[:, ::-1]
            if np.random.rand() < 0.5:
                image, mask = image[::-1], mask[::-1]
        image = np.transpose(image, (2, 0, 1))
        return torch.from_numpy(image.copy()), torch.from_numpy(mask.copy()).unsqueeze(0)


def double_conv(in_c, out_c):
    return nn.Sequential(
        nn.Conv2d(in_c, out_c, 3, padding=1), nn.BatchNorm2d(out_c), nn.ReLU(inplace=True),
        nn.Conv2d(out_c, out_c, 3, padding=1), nn.BatchNorm2d(out_c), nn.ReLU(inplace=True),
    )  # fmt: skip


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1, self.down2 = double_conv(2, 8), double_conv(8, 16)
        self.pool = nn.MaxPool2d(2)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.conv = double_conv(16, 8)
        self.out = nn.Conv2d(8, 1, 1)

    def forward(self, x):
        x1 = self.down1(x)
        x2 = self.down2(self.pool(x1))
        x = self.conv(torch.cat([self.up(x2), x1], dim=1))
        return self.out(x)


def dice(model, loader):
    model.eval()
    inter = total = 0.0
    with torch.no_grad():
        for image, mask in loader:
            pred = (torch.sigmoid(model(image)) > 0.5).float()
            inter += 2 * (pred * mask).sum().item()
            total += (pred.sum() + mask.sum()).item()
    return inter / total


train_loader = DataLoader(Cells(160, augment=True), batch_size=8, shuffle=True)
test_loader = DataLoader(Cells(60, augment=False), batch_size=8)
np.random.seed(SEED)
model = UNet()
loss_fn = nn.BCEWithLogitsLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for epoch in range(10):
    model.train()
    total_loss = 0.0
    for image, mask in train_loader:
        loss = loss_fn(model(image), mask)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total_loss += loss.item()
    print(f"Epoch {epoch}: loss {total_loss / len(train_loader):.4f}, dice {dice(model, test_loader):.4f}")
print(f"FINAL dice={dice(model, test_loader):.4f}")
