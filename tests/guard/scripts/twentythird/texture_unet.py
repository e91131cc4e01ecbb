"""A U-Net for the textures of a collage: brick, gravel, fur and coffee in random regions; cross-entropy plus Dice, poly schedule, mean IoU."""

import os

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import trainworthy

ASSETS = os.path.expanduser("~/.cache/trainworthy/assets/scikit-image-0.26.0")
FILES = ["brick.png", "gravel.png", "chelsea.png", "coffee.png"]
IGNORE, CLASSES, SIZE = 255, len(FILES), 48
EPOCHS, BATCH, LR = 9, 16, 5e-3


def load_textures():
    return [np.asarray(Image.open(os.path.join(ASSETS, name)).convert("L"), dtype=np.float32) / 255 for name in FILES]


class Collages(Dataset):
    """Regions around random points, each filled with a crop; training takes the left 70% of each photo, the test the rest."""

    def __init__(self, textures, count, train):
        self.textures = [t[:, : int(0.7 * t.shape[1])] if train else t[:, int(0.7 * t.shape[1]) :] for t in textures]
        pixels = np.concatenate([t[:, : int(0.7 * t.shape[1])].ravel() for t in textures])
        self.mean, self.std = pixels.mean(), pixels.std()
        self.count, self.train = count, train

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        rng = np.random.RandomState(index if self.train else 100_000 + index)
        points = rng.rand(5, 2) * SIZE
        grid = np.stack(np.mgrid[:SIZE, :SIZE], -1)[:, :, None]
        distance = np.sqrt(((grid - points) ** 2).sum(-1))
        region = distance.argmin(-1)
        classes = rng.randint(CLASSES, size=5)
        image, mask = np.zeros((SIZE, SIZE), np.float32), classes[region]
        for k, c in enumerate(classes):
            texture = self.textures[c]
            top, left = (rng.randint(n - SIZE + 1) for n in texture.shape)
            image = np.where(region == k, texture[top : top + SIZE, left : left + SIZE], image)
        first, second = np.partition(distance, 1, axis=-1)[..., :2].transpose(2, 0, 1)
        mask = np.where(second - first < 1, IGNORE, mask)  # the seams have no class
        image = (image - self.mean) / self.std
        if self.train:
            if np.random.rand() < 0.5:
                image, mask = image[:, ::-1], mask[:, ::-1]
            image = image * np.random.uniform(0.8, 1.2) + np.random.uniform(-0.2, 0.2)
        image = torch.from_numpy(np.ascontiguousarray(image, dtype=np.float32))[None]
        return image, torch.from_numpy(np.ascontiguousarray(mask)).long()


def double(a, b):
    layers = []
    for width in (a, b):
        layers += [nn.Conv2d(width, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    def __init__(self, w=8):
        super().__init__()
        self.down1, self.down2, self.middle = double(1, w), double(w, 2 * w), double(2 * w, 4 * w)
        self.up2, self.up1 = nn.ConvTranspose2d(4 * w, 2 * w, 2, 2), nn.ConvTranspose2d(2 * w, w, 2, 2)
        self.dec2, self.dec1 = double(4 * w, 2 * w), double(2 * w, w)
        self.out = nn.Conv2d(w, CLASSES, 1)

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.middle(F.max_pool2d(b, 2))
        d = self.dec2(torch.cat([self.up2(c), b], 1))
        return self.out(self.dec1(torch.cat([self.up1(d), a], 1)))


def criterion(logits, mask):
    ce = F.cross_entropy(logits, mask, ignore_index=IGNORE)
    valid = (mask != IGNORE).unsqueeze(1)
    probs = logits.softmax(1) * valid
    truth = F.one_hot(mask.masked_fill(mask == IGNORE, 0), CLASSES).permute(0, 3, 1, 2) * valid
    overlap = (probs * truth).sum((0, 2, 3))
    dice = (2 * overlap + 1) / (probs.sum((0, 2, 3)) + truth.sum((0, 2, 3)) + 1)
    return ce + 0.5 * (1 - dice.mean())


def train_epoch(model, optimizer, scheduler, loader):
    model.train()
    for image, mask in loader:
        loss = criterion(model(image), mask)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()


@torch.no_grad()
def mean_iou(model, loader):
    model.eval()
    matrix = torch.zeros(CLASSES, CLASSES)
    for image, mask in loader:
        predicted = model(image).argmax(1)
        valid = mask != IGNORE
        index = mask[valid] * CLASSES + predicted[valid]
        matrix += torch.bincount(index, minlength=CLASSES**2).reshape(CLASSES, CLASSES)
    overlap = matrix.diag()
    return (overlap / (matrix.sum(0) + matrix.sum(1) - overlap)).mean().item()


textures = load_textures()
train_loader = DataLoader(Collages(textures, 320, train=True), BATCH, shuffle=True, drop_last=True)
test_loader = DataLoader(Collages(textures, 100, train=False), 40)


def build():
    model = UNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=1e-4)
    steps = EPOCHS * len(train_loader)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps) ** 0.9)
    return model, optimizer, scheduler


def make_script():
    model, optimizer, scheduler = build()
    return trainworthy.Script(
        model=model,
        optimizer=optimizer,
        train=train_loader,
        val=test_loader,
        loss=lambda model, batch: criterion(model(batch[0]), batch[1]),
        metric=mean_iou,
        train_loop=lambda model, optimizer, batches: train_epoch(model, optimizer, scheduler, batches),
        classes=CLASSES,
        batch_dependence="the Dice term is of the whole batch",
    )


def main():
    seed = int(os.environ.get("SEED", "0"))
    torch.manual_seed(seed)
    np.random.seed(seed)
    model, optimizer, scheduler = build()
    for epoch in range(EPOCHS):
        train_epoch(model, optimizer, scheduler, train_loader)
        if epoch % 3 == 2:
            print(f"epoch {epoch} mean IoU {mean_iou(model, test_loader):.4f}")
    print(f"mIoU {mean_iou(model, test_loader):.4f}")


if __name__ == "__main__":
    main()
