"""Segmentation of drawn street scenes: four classes, borders are unlabelled (255), class weights, polynomial decay per iteration."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import trainworthy

CLASSES, VOID, SIZE = 4, 255, 32
COLOURS = np.array([[0.5, 0.7, 0.9], [0.35, 0.35, 0.38], [0.7, 0.3, 0.25], [0.25, 0.55, 0.2]])


def scene(seed):
    rng = np.random.default_rng(seed)
    mask = np.zeros((SIZE, SIZE), np.uint8)
    horizon = rng.integers(12, 20)
    mask[horizon:] = 1
    for _ in range(rng.integers(1, 3)):
        x, w, h = rng.integers(0, 24), rng.integers(5, 9), rng.integers(4, 7)
        mask[horizon + 2 : horizon + 2 + h, x : x + w] = 2
    x = rng.integers(2, 26)
    mask[horizon - rng.integers(5, 9) : horizon + 1, x : x + 4] = 3
    image = COLOURS[mask] * rng.uniform(0.7, 1.2) + rng.normal(0, 0.12, (SIZE, SIZE, 3))
    edges = np.zeros_like(mask, bool)
    edges[:, 1:] |= mask[:, 1:] != mask[:, :-1]
    edges[1:] |= mask[1:] != mask[:-1]
    label = mask.copy()
    label[edges] = VOID
    return image.astype(np.float32), label


class Streets(Dataset):
    def __init__(self, seeds, augment):
        self.scenes, self.augment = [scene(s) for s in seeds], augment

    def __len__(self):
        return len(self.scenes)

    def __getitem__(self, i):
        image, label = self.scenes[i]
        if self.augment and np.random.rand() < 0.5:
            image, label = image[:, ::-1], label[:, ::-1]
        image = (image - 0.5) / 0.25
        return torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1))), torch.from_numpy(
            label.astype(np.int64)
        )


def block(cin, cout):
    return nn.Sequential(
        nn.Conv2d(cin, cout, 3, padding=1, bias=False), nn.BatchNorm2d(cout), nn.ReLU(inplace=True),
        nn.Conv2d(cout, cout, 3, padding=1, bias=False), nn.BatchNorm2d(cout), nn.ReLU(inplace=True),
    )  # fmt: skip


class UNet(nn.Module):
    def __init__(self, w=12):
        super().__init__()
        self.d1, self.d2, self.mid = block(3, w), block(w, 2 * w), block(2 * w, 4 * w)
        self.up2, self.u2 = nn.ConvTranspose2d(4 * w, 2 * w, 2, 2), block(4 * w, 2 * w)
        self.up1, self.u1 = nn.ConvTranspose2d(2 * w, w, 2, 2), block(2 * w, w)
        self.head = nn.Conv2d(w, CLASSES, 1)

    def forward(self, x):
        a = self.d1(x)
        b = self.d2(F.max_pool2d(a, 2))
        c = self.mid(F.max_pool2d(b, 2))
        b = self.u2(torch.cat([self.up2(c), b], 1))
        return self.head(self.u1(torch.cat([self.up1(b), a], 1)))


train_set, val_set = Streets(range(320), True), Streets(range(1000, 1080), False)
counts = np.bincount(np.concatenate([s[1].ravel() for s in train_set.scenes]), minlength=256)[:CLASSES]
weights = torch.tensor((counts.sum() / (CLASSES * counts)) ** 0.5, dtype=torch.float32)


def loss_of(model, batch):
    image, label = batch
    return F.cross_entropy(model(image), label, weight=weights, ignore_index=VOID)


def train_epoch(model, optimizer, batches, scheduler=None):
    model.train()
    for batch in batches:
        loss = loss_of(model, batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def mean_iou(model, loader):
    model.eval()
    confusion = torch.zeros(CLASSES, CLASSES)
    with torch.no_grad():
        for image, label in loader:
            keep = label != VOID
            predicted = model(image).argmax(1)
            confusion += torch.bincount(label[keep] * CLASSES + predicted[keep], minlength=CLASSES**2).view(
                CLASSES, CLASSES
            )
    inter = confusion.diagonal()
    return (inter / (confusion.sum(0) + confusion.sum(1) - inter).clamp(min=1)).mean().item()


def make_script():
    model = UNet()
    return trainworthy.Script(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4),
        train=train_set,
        val=val_set,
        batch_size=16,
        loss=loss_of,
        metric=mean_iou,
        train_loop=train_epoch,
        classes=CLASSES,
        floor=0.15,
    )


def main():
    torch.manual_seed(0)
    np.random.seed(0)
    loader = DataLoader(train_set, 16, shuffle=True, num_workers=0, drop_last=True)
    val_loader = DataLoader(val_set, 16)
    model = UNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    epochs = 8
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda it: (1 - it / (epochs * len(loader) + 1)) ** 0.9)
    for epoch in range(epochs):
        train_epoch(model, optimizer, loader, scheduler)
        print(f"[{epoch}] mIoU {mean_iou(model, val_loader):.4f}")
    print(f"FINAL miou={mean_iou(model, val_loader):.4f}")


if __name__ == "__main__":
    main()
