"""CNN for 8x8 digits; transforms written by hand, because torchvision is not at hand.

python digits_aug.py --epochs 14 --lr 0.05
"""

import argparse
import math
import random

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from scipy import ndimage
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset


class Compose:
    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, img):
        for t in self.transforms:
            img = t(img)
        return img


class RandomRotation:
    def __init__(self, degrees):
        self.degrees = degrees

    def __call__(self, img):
        return ndimage.rotate(img, random.uniform(-self.degrees, self.degrees), reshape=False, order=1)


class RandomApply:
    def __init__(self, transform, p=0.5):
        self.transform, self.p = transform, p

    def __call__(self, img):
        return self.transform(img) if random.random() < self.p else img


class RandomShift:
    def __init__(self, pad=1):
        self.pad = pad

    def __call__(self, img):
        h, w = img.shape
        i, j = random.randint(0, 2 * self.pad), random.randint(0, 2 * self.pad)
        return np.pad(img, self.pad)[i : i + h, j : j + w]


class Cutout:
    def __init__(self, size=2):
        self.size = size

    def __call__(self, img):
        img = img.copy()
        i, j = (random.randint(0, n - self.size) for n in img.shape)
        img[i : i + self.size, j : j + self.size] = 0
        return img


class ToTensor:
    def __call__(self, img):
        return torch.tensor(img / 16.0, dtype=torch.float32)[None]


class Normalize:
    def __init__(self, mean, std):
        self.mean, self.std = mean, std

    def __call__(self, x):
        return (x - self.mean) / self.std


class Digits(Dataset):
    def __init__(self, images, labels, transform):
        self.images, self.labels, self.transform = images, labels, transform

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.transform(self.images[index]), int(self.labels[index])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 24, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(24)
        self.conv2 = nn.Conv2d(24, 48, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(48)
        self.dropout = nn.Dropout(0.25)
        self.fc = nn.Linear(48 * 4, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)
        x = self.dropout(torch.flatten(x, 1))
        return F.log_softmax(self.fc(x), dim=1)


def get_data(seed):
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8)
    x, test_x, y, test_y = train_test_split(images, labels, train_size=700, random_state=seed, stratify=labels)
    mean, std = x.mean() / 16, x.std() / 16
    train_tf = Compose(
        [RandomApply(Cutout(2)), RandomRotation(10), RandomApply(RandomShift(1)), ToTensor(), Normalize(mean, std)]
    )
    test_tf = Compose([ToTensor(), Normalize(mean, std)])
    return Digits(x, y, train_tf), Digits(test_x, test_y, test_tf)


def get_optimizer(model, args):
    return optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)


def warmup_cosine(args, steps_per_epoch):
    total, warmup = args.epochs * steps_per_epoch, steps_per_epoch

    def factor(step):
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))

    return factor


def train(model, optimizer, train_loader, scheduler=None):
    model.train()
    for data, target in train_loader:
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def test(model, test_loader):
    model.eval()
    correct = total = 0
    with torch.no_grad():
        for data, target in test_loader:
            correct += (model(data).argmax(dim=1) == target).sum().item()
            total += len(target)
    return correct / total


def get_args(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--epochs", type=int, default=14)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def make_script():
    import trainworthy

    args = get_args([])
    train_set, test_set = get_data(args.seed)
    model = Net()
    return trainworthy.Script(
        model=model,
        optimizer=get_optimizer(model, args),
        train=DataLoader(train_set, args.batch_size, shuffle=True),
        val=test_set,
        loss=lambda model, batch: F.nll_loss(model(batch[0]), batch[1]),
        metric=test,
        train_loop=train,
        classes=10,
    )


def main():
    args = get_args()
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    train_set, test_set = get_data(args.seed)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=500)
    model = Net()
    optimizer = get_optimizer(model, args)
    scheduler = LambdaLR(optimizer, warmup_cosine(args, len(train_loader)))
    for epoch in range(1, args.epochs + 1):
        train(model, optimizer, train_loader, scheduler)
        acc = test(model, test_loader)
        print(f"Epoch {epoch}: accuracy {100 * acc:.1f}%")
    print(f"FINAL acc={acc:.4f}")


if __name__ == "__main__":
    main()
