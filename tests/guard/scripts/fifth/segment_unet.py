"""U-Net segmentation: handwritten digits pasted on crops of two photographs, the mask is the ink."""

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits, load_sample_image
from torch.utils.data import DataLoader, Dataset

CONFIG = {
    "seed": 0,
    "size": 24,
    "channels": 8,
    "train_images": 320,
    "val_images": 80,
    "batch_size": 16,
    "epochs": 4,
    "lr": 4e-3,
}


class DigitScenes(Dataset):
    """Pictures and masks are uint8 (0 to 255), as they would be read from PNG files."""

    def __init__(self, n, size, rng, first):
        digits = np.kron(load_digits().images, np.ones((1, 2, 2)))  # 16 x 16
        photos = [load_sample_image("china.jpg"), load_sample_image("flower.jpg")]
        self.images, self.masks = [], []
        for i in range(n):
            photo = photos[rng.integers(2)]
            y, x = rng.integers(photo.shape[0] - size), rng.integers(photo.shape[1] - size)
            image = photo[y : y + size, x : x + size].copy()
            ink = np.zeros((size, size))
            dy, dx = rng.integers(0, size - 16, 2)
            ink[dy : dy + 16, dx : dx + 16] = digits[first + i % 700]
            mask = ink > 6
            image[mask] = np.clip(image[mask] * 0.6 + rng.integers(0, 90, 3), 0, 255)
            self.images.append(image)
            self.masks.append((mask * 255).astype(np.uint8))

    @staticmethod
    def preprocess(array, is_mask):
        if is_mask:
            return torch.from_numpy((array > 127).astype(np.float32))[None]
        return torch.from_numpy(array.astype(np.float32) / 255.0).permute(2, 0, 1)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, idx):
        return {"image": self.preprocess(self.images[idx], False), "mask": self.preprocess(self.masks[idx], True)}


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
    def __init__(self, c):
        super().__init__()
        self.inc, self.down1, self.down2 = double_conv(3, c), double_conv(c, 2 * c), double_conv(2 * c, 4 * c)
        self.up1 = nn.ConvTranspose2d(4 * c, 2 * c, 2, stride=2)
        self.conv1 = double_conv(4 * c, 2 * c)
        self.up2 = nn.ConvTranspose2d(2 * c, c, 2, stride=2)
        self.conv2 = double_conv(2 * c, c)
        self.outc = nn.Conv2d(c, 1, 1)

    def forward(self, x):
        x1 = self.inc(x)
        x2 = self.down1(F.max_pool2d(x1, 2))
        x3 = self.down2(F.max_pool2d(x2, 2))
        x = self.conv1(torch.cat([x2, self.up1(x3)], dim=1))
        x = self.conv2(torch.cat([x1, self.up2(x)], dim=1))
        return self.outc(x)


def dice_loss(probs, target, eps=1.0):
    inter = (probs * target).sum(dim=(1, 2, 3))
    union = probs.sum(dim=(1, 2, 3)) + target.sum(dim=(1, 2, 3))
    return (1 - (2 * inter + eps) / (union + eps)).mean()


class Trainer:
    def __init__(self, config):
        self.config = config
        torch.manual_seed(config["seed"])
        rng = np.random.default_rng(7)
        self.train_set = DigitScenes(config["train_images"], config["size"], rng, first=0)
        self.val_set = DigitScenes(config["val_images"], config["size"], rng, first=900)
        self.train_loader = DataLoader(self.train_set, config["batch_size"], shuffle=True, drop_last=True)
        self.val_loader = DataLoader(self.val_set, config["batch_size"])
        self.net = UNet(config["channels"])
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=config["lr"])
        self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, "max", patience=2)
        self.criterion = nn.BCEWithLogitsLoss()

    def train_epoch(self):
        self.net.train()
        for batch in self.train_loader:
            logits = self.net(batch["image"])
            loss = self.criterion(logits, batch["mask"])
            loss += dice_loss(torch.sigmoid(logits), batch["mask"])
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
            self.optimizer.step()
        return loss.item()

    @torch.no_grad()
    def validate(self):
        self.net.eval()
        inter = union = 0
        for batch in self.val_loader:
            pred = torch.sigmoid(self.net(batch["image"])) > 0.5
            truth = batch["mask"] > 0.5
            inter += (pred & truth).sum().item()
            union += (pred | truth).sum().item()
        return inter / max(union, 1)

    def fit(self):
        for epoch in range(1, self.config["epochs"] + 1):
            loss = self.train_epoch()
            iou = self.validate()
            self.scheduler.step(iou)
            print(f"[{epoch}/{self.config['epochs']}] loss {loss:.4f} val IoU {iou:.4f}")
        return iou


if __name__ == "__main__":
    trainer = Trainer(CONFIG)
    print(f"FINAL iou={trainer.fit():.4f}")
