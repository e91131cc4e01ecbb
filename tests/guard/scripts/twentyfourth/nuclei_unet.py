"""Segmentation of nuclei in one microscopy image with a small U-Net: the upper part trains, the lower part tests."""

import os
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

ROOT = Path.home() / ".cache/trainworthy/assets/stardist-0.9.2"
CONFIG = {"patch": 64, "batch_size": 8, "accumulate": 2, "epochs": 6, "patches": 320, "lr": 2e-3, "width": 12}


class Patches(Dataset):
    """Random crops, mirrored at random."""

    def __init__(self, image, mask, patch, length):
        self.image, self.mask, self.patch, self.length = image, mask, patch, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        top = torch.randint(self.image.shape[0] - self.patch, ()).item()
        left = torch.randint(self.image.shape[1] - self.patch, ()).item()
        window = (slice(top, top + self.patch), slice(left, left + self.patch))
        image, mask = self.image[window], self.mask[window]
        for dim in (0, 1):
            if torch.rand(()) < 0.5:
                image, mask = image.flip(dim), mask.flip(dim)
        return image[None], mask[None]


def double_conv(a, b):
    return nn.Sequential(
        nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True),
        nn.Conv2d(b, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True),
    )  # fmt: skip


class UNet(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.down1, self.down2, self.bottom = double_conv(1, w), double_conv(w, 2 * w), double_conv(2 * w, 4 * w)
        self.up2, self.up1 = nn.ConvTranspose2d(4 * w, 2 * w, 2, stride=2), nn.ConvTranspose2d(2 * w, w, 2, stride=2)
        self.conv2, self.conv1 = double_conv(4 * w, 2 * w), double_conv(2 * w, w)
        self.head = nn.Conv2d(w, 1, 1)

    def forward(self, x):
        d1 = self.down1(x)
        d2 = self.down2(F.max_pool2d(d1, 2))
        h = self.bottom(F.max_pool2d(d2, 2))
        h = self.conv2(torch.cat([self.up2(h), d2], dim=1))
        h = self.conv1(torch.cat([self.up1(h), d1], dim=1))
        return self.head(h)


def dice_loss(logits, target, eps=1.0):
    p = logits.sigmoid()
    inter = (p * target).sum(dim=(1, 2, 3))
    return (1 - (2 * inter + eps) / (p.sum(dim=(1, 2, 3)) + target.sum(dim=(1, 2, 3)) + eps)).mean()


@torch.no_grad()
def evaluate(model, image, mask):
    model.eval()
    predicted = (model(image[None, None]).sigmoid() > 0.5).float()[0, 0]
    return (2 * (predicted * mask).sum() / (predicted.sum() + mask.sum())).item()


def load():
    image = torch.from_numpy(np.asarray(Image.open(ROOT / "img2d.tif")).astype(np.float32))
    mask = torch.from_numpy((np.asarray(Image.open(ROOT / "mask2d.tif")) > 0).astype(np.float32))
    train, test = slice(0, 320), slice(384, 512)
    mean, std = image[train].mean(), image[train].std()
    image = (image - mean) / std
    return (image[train], mask[train]), (image[test], mask[test])


def main():
    torch.manual_seed(int(os.environ.get("SEED", "0")))
    cfg = CONFIG
    (image, mask), test = load()
    loader = DataLoader(Patches(image, mask, cfg["patch"], cfg["patches"]), batch_size=cfg["batch_size"], shuffle=True)
    model = UNet(cfg["width"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg["lr"], weight_decay=1e-4)
    updates = cfg["epochs"] * len(loader) // cfg["accumulate"]
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=cfg["lr"], total_steps=updates)
    for epoch in range(cfg["epochs"]):
        model.train()
        running = 0.0
        optimizer.zero_grad()
        for step, (x, y) in enumerate(loader):
            logits = model(x)
            loss = F.binary_cross_entropy_with_logits(logits, y) + dice_loss(logits, y)
            (loss / cfg["accumulate"]).backward()
            running += loss.item()
            if (step + 1) % cfg["accumulate"] == 0:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        dice = evaluate(model, *test)
        print(f"epoch {epoch} loss {running / len(loader):.3f} dice {dice:.3f}", flush=True)
    print(f"dice {dice:.4f}")


if __name__ == "__main__":
    main()
