"""Petals in a grey photograph: a U-Net with BCE and soft Dice; the masks are made from the colours (scikit-learn's flower.jpg)."""

import numpy as np
import torch
from sklearn.datasets import load_sample_image
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import trainworthy

SEED = 0
SIZE = 32
photo = load_sample_image("flower.jpg").astype(np.float32) / 255
grey = photo.mean(2)
petal = ((photo[..., 0] - photo[..., 1]) > 0.12).astype(np.float32)


class Crops(Dataset):
    def __init__(self, left, right, step, train):
        self.corners = [
            (r, c) for r in range(60, 360 - SIZE, step) for c in range(left, right - SIZE + 1, step)
            if 0.02 < petal[r : r + SIZE, c : c + SIZE].mean() < 0.98
        ]  # fmt: skip
        self.train = train

    def __len__(self):
        return len(self.corners)

    def __getitem__(self, i):
        r, c = self.corners[i]
        image, mask = grey[r : r + SIZE, c : c + SIZE], petal[r : r + SIZE, c : c + SIZE]
        if self.train:
            if np.random.rand() < 0.5:
                image, mask = image[:, ::-1], mask[:, ::-1]
            if np.random.rand() < 0.5:
                image, mask = image[::-1], mask[::-1]
        return torch.from_numpy(image.copy())[None], torch.from_numpy(mask.copy())[None]


train_set, val_set = Crops(0, 384, 12, True), Crops(400, 640, 24, False)


def double(cin, cout):
    return nn.Sequential(
        nn.Conv2d(cin, cout, 3, padding=1), nn.BatchNorm2d(cout), nn.ReLU(),
        nn.Conv2d(cout, cout, 3, padding=1), nn.BatchNorm2d(cout), nn.ReLU(),
    )  # fmt: skip


class UNet(nn.Module):
    def __init__(self, w=8):
        super().__init__()
        self.down1, self.down2, self.bottom = double(1, w), double(w, 2 * w), double(2 * w, 4 * w)
        self.up2, self.up1 = nn.ConvTranspose2d(4 * w, 2 * w, 2, 2), nn.ConvTranspose2d(2 * w, w, 2, 2)
        self.dec2, self.dec1 = double(4 * w, 2 * w), double(2 * w, w)
        self.out = nn.Conv2d(w, 1, 1)

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.bottom(F.max_pool2d(b, 2))
        x = self.dec2(torch.cat([self.up2(c), b], 1))
        return self.out(self.dec1(torch.cat([self.up1(x), a], 1)))


def bce_dice(logits, mask):
    p = logits.sigmoid()
    overlap = 2 * (p * mask).sum((1, 2, 3)) + 1
    dice = 1 - overlap / (p.sum((1, 2, 3)) + mask.sum((1, 2, 3)) + 1)
    return F.binary_cross_entropy_with_logits(logits, mask) + dice.mean()


def train_epoch(model, optimizer, loader):
    model.train()
    for image, mask in loader:
        optimizer.zero_grad()
        bce_dice(model(image), mask).backward()
        optimizer.step()


def iou(model, loader):
    model.eval()
    inter = union = 0
    with torch.no_grad():
        for image, mask in loader:
            found, wanted = model(image) > 0, mask > 0.5
            inter += (found & wanted).sum().item()
            union += (found | wanted).sum().item()
    return inter / max(union, 1)


def make_script():
    model = UNet()
    return trainworthy.Script(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=2e-3),
        train=train_set,
        val=val_set,
        batch_size=16,
        classes=2,
        loss=lambda model, batch: bce_dice(model(batch[0]), batch[1]),
        metric=iou,
        floor=0.3,
        train_loop=train_epoch,
    )


def main():
    torch.manual_seed(SEED)
    np.random.seed(SEED)
    model = UNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    train_loader, val_loader = DataLoader(train_set, 16, shuffle=True), DataLoader(val_set, 32)
    print(len(train_set), len(val_set))
    for epoch in range(10):
        train_epoch(model, optimizer, train_loader)
        if epoch % 2:
            print(epoch + 1, iou(model, val_loader))
    print(f"FINAL iou={iou(model, val_loader):.4f}")


if __name__ == "__main__":
    main()
