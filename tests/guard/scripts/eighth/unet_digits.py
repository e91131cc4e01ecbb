"""Segmentation of digits on photographs with a small U-Net: pictures and masks are flipped together, BCE with logits, IoU on held-out pictures."""

import random

import numpy as np
import torch
import torch.nn as nn
import torchvision.transforms.functional as TF
from sklearn.datasets import load_digits, load_sample_image
from torch.utils.data import DataLoader, Dataset

SEED = 0
random.seed(SEED)
np.random.seed(SEED)
torch.manual_seed(SEED)

SIZE = 32


def make_data(n):
    """Pictures (H, W, 3) and masks of 0 and 255, both uint8, as they would be read from files."""
    digits = load_digits().images
    photo = load_sample_image("china.jpg")
    images, masks = [], []
    for _ in range(n):
        y, x = np.random.randint(photo.shape[0] - SIZE), np.random.randint(photo.shape[1] - SIZE)
        image = photo[y : y + SIZE, x : x + SIZE].copy()
        mask = np.zeros((SIZE, SIZE), np.uint8)
        for _ in range(np.random.randint(1, 3)):
            digit = np.kron(digits[np.random.randint(len(digits))], np.ones((2, 2))) > 7
            top, left = np.random.randint(0, SIZE - 16, 2)
            mask[top : top + 16, left : left + 16][digit] = 255
        colour = np.random.randint(0, 256, 3)
        image[mask > 0] = (0.6 * colour + 0.4 * image[mask > 0]).astype(np.uint8)
        images.append(image)
        masks.append(mask)
    return images, masks


class SegmentationDataset(Dataset):
    def __init__(self, images, masks, augment=False):
        self.images, self.masks, self.augment = images, masks, augment

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        image = TF.to_tensor(self.images[i])
        mask = torch.from_numpy(self.masks[i]).unsqueeze(0).float() / 255
        if self.augment:
            if random.random() > 0.5:
                image = TF.hflip(image)
                mask = TF.hflip(mask)
            if random.random() > 0.5:
                image = TF.vflip(image)
                mask = TF.vflip(mask)
        return image, mask


def double_conv(cin, cout):
    return nn.Sequential(
        nn.Conv2d(cin, cout, 3, padding=1, bias=False),
        nn.BatchNorm2d(cout),
        nn.ReLU(inplace=True),
        nn.Conv2d(cout, cout, 3, padding=1, bias=False),
        nn.BatchNorm2d(cout),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1 = double_conv(3, 12)
        self.down2 = double_conv(12, 24)
        self.down3 = double_conv(24, 32)
        self.pool = nn.MaxPool2d(2)
        self.up2 = nn.ConvTranspose2d(32, 24, 2, stride=2)
        self.conv2 = double_conv(48, 24)
        self.up1 = nn.ConvTranspose2d(24, 12, 2, stride=2)
        self.conv1 = double_conv(24, 12)
        self.out = nn.Conv2d(12, 1, 1)

    def forward(self, x):
        c1 = self.down1(x)
        c2 = self.down2(self.pool(c1))
        c3 = self.down3(self.pool(c2))
        x = self.conv2(torch.cat([self.up2(c3), c2], dim=1))
        x = self.conv1(torch.cat([self.up1(x), c1], dim=1))
        return self.out(x)


images, masks = make_data(500)
train_loader = DataLoader(SegmentationDataset(images[:400], masks[:400], augment=True), batch_size=16, shuffle=True)
val_loader = DataLoader(SegmentationDataset(images[400:], masks[400:]), batch_size=25)

model = UNet()
loss_fn = nn.BCEWithLogitsLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", factor=0.5, patience=2)


def check_iou(loader, model):
    inter = union = 0
    model.eval()
    with torch.no_grad():
        for x, y in loader:
            preds = torch.sigmoid(model(x)) > 0.5
            y = y > 0.5
            inter += (preds & y).sum().item()
            union += (preds | y).sum().item()
    model.train()
    return inter / (union + 1e-8)


for epoch in range(8):
    total = 0.0
    for x, y in train_loader:
        pred = model(x)
        loss = loss_fn(pred, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    iou = check_iou(val_loader, model)
    scheduler.step(iou)
    print(f"Epoch {epoch + 1}: loss {total / len(train_loader):.4f} val IoU {iou:.4f}")

print(f"FINAL iou={iou:.4f}")
