"""Leaf and spots on photographs (drawn here): three classes for each pixel, torchvision's joint transforms, a small U-Net."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2

import trainworthy

SEED = 0
SIZE, CLASSES = 48, 3  # ground, leaf, spot


def draw(rng):
    yy, xx = np.mgrid[:SIZE, :SIZE]
    image = rng.normal(0, 12, (SIZE, SIZE, 3)) + np.array([120, 100, 80]) + rng.normal(0, 10, 3)
    mask = np.zeros((SIZE, SIZE), np.uint8)
    cy, cx, angle = rng.uniform(18, 30), rng.uniform(18, 30), rng.uniform(0, np.pi)
    u, v = (xx - cx) * np.cos(angle) + (yy - cy) * np.sin(angle), (yy - cy) * np.cos(angle) - (xx - cx) * np.sin(angle)
    leaf = (u / rng.uniform(13, 20)) ** 2 + (v / rng.uniform(7, 11)) ** 2 < 1
    mask[leaf] = 1
    image[leaf] = np.array([60, 140, 60]) + rng.normal(0, 15, 3) + rng.normal(0, 12, (leaf.sum(), 3))
    for _ in range(rng.integers(1, 6)):
        y, x, r = rng.uniform(10, 38), rng.uniform(10, 38), rng.uniform(1.5, 4)
        spot = leaf & ((yy - y) ** 2 + (xx - x) ** 2 < r**2)
        mask[spot] = 2
        image[spot] = np.array([130, 95, 50]) + rng.normal(0, 12, (spot.sum(), 3))
    return np.clip(image, 0, 255).astype(np.uint8), mask


class Leaves(Dataset):
    def __init__(self, pictures, transform):
        self.pictures, self.transform = pictures, transform

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, i):
        image, mask = self.pictures[i]
        image = tv_tensors.Image(torch.from_numpy(image).permute(2, 0, 1))
        image, mask = self.transform(image, tv_tensors.Mask(torch.from_numpy(mask)))
        return image, mask.long()


mean, std = [0.42, 0.42, 0.3], [0.15, 0.12, 0.11]
final = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std)]
train_transform = v2.Compose([
    v2.RandomHorizontalFlip(), v2.RandomVerticalFlip(), v2.RandomAffine(20, translate=(0.1, 0.1)), v2.ColorJitter(0.2, 0.2), *final,
])  # fmt: skip
val_transform = v2.Compose(final)


def load():
    rng = np.random.default_rng(8)
    pictures = [draw(rng) for _ in range(420)]
    return Leaves(pictures[:340], train_transform), Leaves(pictures[340:], val_transform)


def block(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU())


class UNet(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.first, self.second, self.third = block(3, width), block(width, 2 * width), block(2 * width, 2 * width)
        self.up, self.last = block(4 * width, width), block(2 * width, width)
        self.head = nn.Conv2d(width, CLASSES, 1)

    def forward(self, x):
        a = self.first(x)
        b = self.second(F.max_pool2d(a, 2))
        c = self.third(F.max_pool2d(b, 2))
        d = self.up(torch.cat([F.interpolate(c, scale_factor=2), b], dim=1))
        return self.head(self.last(torch.cat([F.interpolate(d, scale_factor=2), a], dim=1)))


def loss_fn(model, batch):
    images, masks = batch
    return F.cross_entropy(model(images), masks)


def train_epoch(model, optimizer, loader):
    model.train()
    for batch in loader:
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()


@torch.no_grad()
def mean_iou(model, loader):
    model.eval()
    counts = torch.zeros(CLASSES, CLASSES)
    for images, masks in loader:
        predicted = model(images).argmax(1)
        counts += torch.bincount((masks * CLASSES + predicted).flatten(), minlength=CLASSES**2).view(CLASSES, CLASSES)
    hit = counts.diagonal()
    return (hit / (counts.sum(0) + counts.sum(1) - hit)).mean().item()


def make_script():
    train_set, val_set = load()
    model = UNet()
    return trainworthy.Script(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
        train=train_set,
        val=val_set,
        batch_size=16,
        loss=loss_fn,
        metric=mean_iou,
        train_loop=train_epoch,
        classes=CLASSES,
        floor=0.22,
    )


def main():
    torch.manual_seed(SEED)
    train_set, val_set = load()
    train_loader, val_loader = DataLoader(train_set, 16, shuffle=True), DataLoader(val_set, 40)
    model = UNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(6):
        train_epoch(model, optimizer, train_loader)
        print(f"epoch {epoch}: mean IoU {mean_iou(model, val_loader):.3f}")
    print(f"FINAL iou={mean_iou(model, val_loader):.4f}")


if __name__ == "__main__":
    main()
