# U-Net for nuclei: random crops of the upper part of one microscope picture, IoU on its lower part.
import argparse
import os
import random

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

ROOT = os.path.expanduser("~/.cache/trainworthy/assets/stardist-0.9.2")


def load_picture():
    image = np.asarray(Image.open(os.path.join(ROOT, "img2d.tif"))).astype(np.float32)
    instances = np.asarray(Image.open(os.path.join(ROOT, "mask2d.tif"))).astype(np.float32)
    low, high = np.percentile(image, (1, 99.8))
    return np.clip((image - low) / (high - low), 0, 1).astype(np.float32), instances


class Crops(Dataset):
    """Random crops with flips and turns."""

    def __init__(self, image, instances, size, length):
        self.image, self.size, self.length = image, size, length
        self.mask = (instances > 0).astype(np.float32)

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        h, w = self.image.shape
        y, x = random.randrange(h - self.size), random.randrange(w - self.size)
        image = self.image[y : y + self.size, x : x + self.size]
        mask = self.mask[y : y + self.size, x : x + self.size]
        if random.random() < 0.5:
            image, mask = image[:, ::-1], mask[:, ::-1]
        turns = random.randrange(4)
        image, mask = np.rot90(image, turns), np.rot90(mask, turns)
        return torch.from_numpy(image.copy())[None], torch.from_numpy(mask.copy())[None]


class Tiles(Dataset):
    """Every tile of a picture once."""

    def __init__(self, image, instances, size):
        self.image, self.mask, self.size = image, (instances > 0).astype(np.float32), size
        rows, columns = image.shape[0] // size, image.shape[1] // size
        self.corners = [(r * size, c * size) for r in range(rows) for c in range(columns)]

    def __len__(self):
        return len(self.corners)

    def __getitem__(self, i):
        (y, x), s = self.corners[i], self.size
        image, mask = self.image[y : y + s, x : x + s], self.mask[y : y + s, x : x + s]
        return torch.from_numpy(image)[None], torch.from_numpy(mask)[None]


def block(cin, cout):
    return nn.Sequential(
        nn.Conv2d(cin, cout, 3, padding=1),
        nn.BatchNorm2d(cout),
        nn.ReLU(inplace=True),
        nn.Conv2d(cout, cout, 3, padding=1),
        nn.BatchNorm2d(cout),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.down1, self.down2, self.bottom = block(1, width), block(width, 2 * width), block(2 * width, 4 * width)
        self.pool = nn.MaxPool2d(2)
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.up1 = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.merge2, self.merge1 = block(4 * width, 2 * width), block(2 * width, width)
        self.out = nn.Conv2d(width, 1, 1)

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(self.pool(a))
        c = self.bottom(self.pool(b))
        b = self.merge2(torch.cat([b, self.up2(c)], dim=1))
        a = self.merge1(torch.cat([a, self.up1(b)], dim=1))
        return self.out(a)


def evaluate(net, loader):
    net.eval()
    overlap = union = 0
    with torch.no_grad():
        for image, mask in loader:
            predicted, true = net(image) > 0, mask > 0.5
            overlap += (predicted & true).sum().item()
            union += (predicted | true).sum().item()
    return overlap / max(union, 1)


def train(net, loader, test_loader, args):
    criterion = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(net.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
    for epoch in range(args.epochs):
        net.train()
        running = 0.0
        for image, mask in loader:
            loss = criterion(net(image), mask)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            running += loss.item()
        scheduler.step()
        iou = evaluate(net, test_loader)
        print(f"[{epoch + 1}/{args.epochs}] loss={running / len(loader):.4f} IoU={iou:.4f}")
        torch.save(net.state_dict(), args.checkpoint)
    return iou


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", default="/tmp/nuclei_unet.pt")
    args = parser.parse_args()
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    image, instances = load_picture()
    split = 352
    train_set = Crops(image[:split], instances[:split], args.size, 160)
    test_set = Tiles(image[split:], instances[split:], 32)
    loader = DataLoader(train_set, batch_size=args.batch, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=16)
    print(f"FINAL iou={train(UNet(), loader, test_loader, args):.4f}")
