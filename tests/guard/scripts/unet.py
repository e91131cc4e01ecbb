"""Small U-Net, BCE + dice, after milesial/Pytorch-UNet: segment a digit on a cluttered background."""

import argparse
import logging
import random
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset, Subset, random_split
from tqdm import tqdm


class DoubleConv(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.double_conv = nn.Sequential(
            nn.Conv2d(i, o, 3, padding=1, bias=False),
            nn.BatchNorm2d(o),
            nn.ReLU(inplace=True),
            nn.Conv2d(o, o, 3, padding=1, bias=False),
            nn.BatchNorm2d(o),
            nn.ReLU(inplace=True),
        )

    def forward(self, x):
        return self.double_conv(x)


class Up(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.up = nn.ConvTranspose2d(i, i // 2, 2, stride=2)
        self.conv = DoubleConv(i, o)

    def forward(self, x1, x2):
        x1 = self.up(x1)
        x = torch.cat([x2, x1], dim=1)
        return self.conv(x)


class UNet(nn.Module):
    def __init__(self, c=8):
        super().__init__()
        self.inc = DoubleConv(1, c)
        self.down1 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(c, 2 * c))
        self.down2 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(2 * c, 4 * c))
        self.up1 = Up(4 * c, 2 * c)
        self.up2 = Up(2 * c, c)
        self.outc = nn.Conv2d(c, 1, 1)

    def forward(self, x):
        x1 = self.inc(x)
        x2 = self.down1(x1)
        x3 = self.down2(x2)
        x = self.up1(x3, x2)
        x = self.up2(x, x1)
        return self.outc(x)


class DigitScenes(Dataset):
    """A digit at one place, a second one upside down as clutter; the mask is the first."""

    def __init__(self, augment=True):
        self.augment = augment
        rng = np.random.RandomState(3)
        digits = load_digits().images / 16.0
        self.images, self.masks = [], []
        for i in range(400):
            scene = rng.rand(24, 24) * 0.4
            y, x = rng.randint(0, 5, 2)
            big = np.kron(digits[i], np.ones((2, 2)))
            mask = np.zeros((24, 24))
            mask[y : y + 16, x : x + 16] = big > 0.4
            scene = np.where(mask > 0, 0.35 + 0.5 * rng.rand(24, 24), scene)
            r, s = rng.randint(0, 16, 2)
            scene[r : r + 8, s : s + 8] = np.where(
                mask[r : r + 8, s : s + 8] > 0,
                scene[r : r + 8, s : s + 8],
                scene[r : r + 8, s : s + 8] + 0.3 * digits[-i - 1][::-1],
            )
            self.images.append(scene.astype("float32"))
            self.masks.append(mask.astype("float32"))

    def __len__(self):
        return len(self.images)

    def __getitem__(self, idx):
        img, mask = self.images[idx], self.masks[idx]
        if self.augment:
            flip, turn = random.random() < 0.5, random.randrange(4)
            if flip:
                img, mask = img[:, ::-1], mask[:, ::-1]
            img = np.rot90(img, turn)
            mask = np.rot90(mask, turn)
        return {
            "image": torch.as_tensor(img.copy()).float().contiguous()[None],
            "mask": torch.as_tensor(mask.copy()).float().contiguous(),
        }


def dice_coeff(input, target, epsilon=1e-6):
    inter = 2 * (input * target).sum(dim=(-1, -2))
    sets_sum = input.sum(dim=(-1, -2)) + target.sum(dim=(-1, -2))
    return ((inter + epsilon) / (sets_sum + epsilon)).mean()


def dice_loss(input, target):
    return 1 - dice_coeff(input, target)


@torch.inference_mode()
def evaluate(net, dataloader):
    net.eval()
    dice_score = 0
    for batch in dataloader:
        mask_pred = (torch.sigmoid(net(batch["image"]).squeeze(1)) > 0.5).float()
        dice_score += dice_coeff(mask_pred, batch["mask"])
    net.train()
    return dice_score / max(len(dataloader), 1)


def train_model(model, epochs, batch_size, learning_rate, val_percent=0.2, save_checkpoint=True):
    dataset = DigitScenes()
    n_val = int(len(dataset) * val_percent)
    n_train = len(dataset) - n_val
    train_set, val_set = random_split(dataset, [n_train, n_val], generator=torch.Generator().manual_seed(0))
    val_set = Subset(DigitScenes(augment=False), val_set.indices)  # the same pictures, as they are
    loader_args = {"batch_size": batch_size, "num_workers": 0}
    train_loader = DataLoader(train_set, shuffle=True, **loader_args)
    val_loader = DataLoader(val_set, shuffle=False, drop_last=True, **loader_args)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=learning_rate, weight_decay=1e-8, momentum=0.9, foreach=True)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=5)  # goal: maximize Dice score
    criterion = nn.BCEWithLogitsLoss()
    global_step = 0
    for epoch in range(1, epochs + 1):
        model.train()
        epoch_loss = 0
        with tqdm(total=n_train, desc=f"Epoch {epoch}/{epochs}", unit="img") as pbar:
            for batch in train_loader:
                images, true_masks = batch["image"], batch["mask"]
                masks_pred = model(images)
                loss = criterion(masks_pred.squeeze(1), true_masks)
                loss += dice_loss(torch.sigmoid(masks_pred.squeeze(1)), true_masks)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                pbar.update(images.shape[0])
                global_step += 1
                epoch_loss += loss.item()
                pbar.set_postfix(**{"loss (batch)": loss.item()})
                division_step = n_train // (2 * batch_size)
                if division_step > 0 and global_step % division_step == 0:
                    val_score = evaluate(model, val_loader)
                    scheduler.step(val_score)
                    logging.info(f"Validation Dice score: {val_score}")
        if save_checkpoint:
            Path("checkpoints").mkdir(parents=True, exist_ok=True)
            torch.save(model.state_dict(), f"checkpoints/checkpoint_epoch{epoch}.pth")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", "-e", type=int, default=6)
    parser.add_argument("--batch-size", "-b", type=int, default=16)
    parser.add_argument("--learning-rate", "-l", type=float, default=1e-3)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
    random.seed(0)
    torch.manual_seed(0)
    train_model(UNet(), args.epochs, args.batch_size, args.learning_rate)
