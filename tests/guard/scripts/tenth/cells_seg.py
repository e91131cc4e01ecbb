"""Binary segmentation of nuclei in microscope-like images: small U-Net, BCE + Dice, flips and gamma as augmentation."""

import random

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from scipy.ndimage import gaussian_filter
from torch.utils.data import DataLoader, Dataset

CFG = {"seed": 0, "size": 32, "n_train": 120, "n_val": 80, "batch_size": 8, "accumulate": 1, "epochs": 10, "lr": 3e-3}
BN_MOMENTUM = 0.1


def draw_image(rng, size):
    """(image as uint8, mask of 0 and 255 as uint8), like files that were read by PIL."""
    yy, xx = np.mgrid[:size, :size]
    mask = np.zeros((size, size), bool)
    brightness = np.zeros((size, size))
    for _ in range(rng.integers(3, 7)):
        cy, cx = rng.uniform(2, size - 2, 2)
        a, b = rng.uniform(2.5, 6, 2)
        phi = rng.uniform(0, np.pi)
        u, v = (yy - cy) * np.cos(phi) + (xx - cx) * np.sin(phi), (xx - cx) * np.cos(phi) - (yy - cy) * np.sin(phi)
        inside = (u / a) ** 2 + (v / b) ** 2 < 1
        mask |= inside
        brightness = np.where(inside, rng.uniform(0.25, 0.6), brightness)
    background = 0.25 * gaussian_filter(rng.normal(size=(size, size)), 5) * 5 + 0.002 * xx * rng.normal()
    debris = (gaussian_filter(rng.normal(size=(size, size)), 1) > 0.65) * 0.4
    image = gaussian_filter(brightness + debris, 1.2) + background + rng.normal(0, 0.08, (size, size)) + 0.2
    return (np.clip(image, 0, 1) * 255).astype(np.uint8), mask.astype(np.uint8) * 255


def joint_augment(image, mask):
    if random.random() < 0.5:
        image, mask = image[:, ::-1], mask[:, ::-1]
    if random.random() < 0.5:
        image, mask = image[::-1], mask[::-1]
    k = random.randint(0, 3)
    image, mask = np.rot90(image, k), np.rot90(mask, k)
    gamma = random.uniform(0.8, 1.25)
    return 255.0 * (image / 255.0) ** gamma, mask


class CellDataset(Dataset):
    def __init__(self, n, seed, augment=False):
        rng = np.random.default_rng(seed)
        self.items = [draw_image(rng, CFG["size"]) for _ in range(n)]
        self.augment = augment

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        image, mask = self.items[i]
        if self.augment:
            image, mask = joint_augment(image, mask)
        image = torch.from_numpy(np.ascontiguousarray(image)).float().unsqueeze(0) / 255
        mask = torch.from_numpy(np.ascontiguousarray(mask)).float().unsqueeze(0) / 255
        return (image - 0.35) / 0.2, mask


class DoubleConv(nn.Sequential):
    def __init__(self, in_ch, out_ch):
        super().__init__(
            nn.Conv2d(in_ch, out_ch, 3, padding=1, bias=False),
            nn.BatchNorm2d(out_ch, momentum=BN_MOMENTUM),
            nn.ReLU(inplace=True),
            nn.Conv2d(out_ch, out_ch, 3, padding=1, bias=False),
            nn.BatchNorm2d(out_ch, momentum=BN_MOMENTUM),
            nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    def __init__(self, c=8):
        super().__init__()
        self.inc, self.down1, self.down2 = DoubleConv(1, c), DoubleConv(c, 2 * c), DoubleConv(2 * c, 4 * c)
        self.up1, self.up2 = DoubleConv(6 * c, 2 * c), DoubleConv(3 * c, c)
        self.outc = nn.Conv2d(c, 1, 1)

    def forward(self, x):
        x1 = self.inc(x)
        x2 = self.down1(F.max_pool2d(x1, 2))
        x3 = self.down2(F.max_pool2d(x2, 2))
        y = self.up1(torch.cat([F.interpolate(x3, scale_factor=2), x2], dim=1))
        y = self.up2(torch.cat([F.interpolate(y, scale_factor=2), x1], dim=1))
        return self.outc(y)


def dice_loss(prob, target, smooth=1.0):
    inter = (prob * target).sum(dim=(1, 2, 3))
    total = prob.sum(dim=(1, 2, 3)) + target.sum(dim=(1, 2, 3))
    return (1 - (2 * inter + smooth) / (total + smooth)).mean()


def bce_dice(logits, target):
    return F.binary_cross_entropy_with_logits(logits, target) + dice_loss(torch.sigmoid(logits), target)


def train_fn(model, optimizer, loader):
    model.train()
    for i, (images, masks) in enumerate(loader):
        loss = bce_dice(model(images), masks)
        (loss / CFG["accumulate"]).backward()
        if (i + 1) % CFG["accumulate"] == 0:
            optimizer.step()
            optimizer.zero_grad()


@torch.no_grad()
def val_iou(model, loader):
    model.eval()
    inter = union = 0
    for images, masks in loader:
        pred = torch.sigmoid(model(images)) > 0.5
        inter += (pred & (masks > 0.5)).sum().item()
        union += (pred | (masks > 0.5)).sum().item()
    return inter / max(union, 1)


def make_script():
    import trainworthy

    model = UNet()
    return trainworthy.Script(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=CFG["lr"]),
        train=CellDataset(CFG["n_train"], 1, augment=True),
        val=CellDataset(CFG["n_val"], 2),
        batch_size=CFG["batch_size"],
        loss=lambda model, batch: bce_dice(model(batch[0]), batch[1]),
        metric=val_iou,
        train_loop=train_fn,
        accumulate=CFG["accumulate"],
        floor=0.3,
        ceiling=1.0,
    )


if __name__ == "__main__":
    random.seed(CFG["seed"])
    torch.manual_seed(CFG["seed"])
    train_dl = DataLoader(CellDataset(CFG["n_train"], 1, augment=True), CFG["batch_size"], shuffle=True)
    val_dl = DataLoader(CellDataset(CFG["n_val"], 2), 20)
    net = UNet()
    opt = torch.optim.Adam(net.parameters(), lr=CFG["lr"])
    sched = torch.optim.lr_scheduler.MultiStepLR(opt, milestones=[6, 8], gamma=0.3)
    for ep in range(CFG["epochs"]):
        train_fn(net, opt, train_dl)
        sched.step()
        iou = val_iou(net, val_dl)
        print(f"[{ep + 1}/{CFG['epochs']}] val IoU {iou:.4f}")
    print(f"FINAL iou={iou:.4f}")
