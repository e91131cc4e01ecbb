"""Digits with mixup, label smoothing and an exponential moving average of the weights; the loop uses Accelerate."""

import copy

import numpy as np
import torch
import torch.nn as nn
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset

cfg = {"seed": 0, "epochs": 5, "batch_size": 32, "lr": 0.1, "ema_decay": 0.95, "mixup_alpha": 0.3, "smoothing": 0.1}


class DigitDataset(Dataset):
    mean, std = 4.88, 6.02  # of the training pictures

    def __init__(self, split):
        digits = load_digits()
        order = np.random.RandomState(0).permutation(len(digits.images))
        chosen = order[:1000] if split == "train" else order[1000:]
        self.images = digits.images[chosen].astype(np.float32)
        self.labels = digits.target[chosen]
        self.train = split == "train"

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, idx):
        image = (self.images[idx] - self.mean) / self.std
        return torch.from_numpy(image)[None], int(self.labels[idx])


def conv_bn(cin, cout, stride=1):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, stride, 1, bias=False), nn.BatchNorm2d(cout), nn.ReLU())


def build_model(width=16):
    return nn.Sequential(
        conv_bn(1, width),
        conv_bn(width, 2 * width, 2),
        conv_bn(2 * width, 2 * width),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * width, 10),
    )


class ModelEMA:
    def __init__(self, model, decay):
        self.module = copy.deepcopy(model).eval()
        self.decay = decay
        for p in self.module.parameters():
            p.requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        source = model.state_dict()
        for name, value in self.module.state_dict().items():
            if value.dtype.is_floating_point:
                value.mul_(self.decay).add_(source[name].detach(), alpha=1 - self.decay)
            else:
                value.copy_(source[name])


def mixup(x, y, alpha, rng):
    lam = float(rng.beta(alpha, alpha))
    index = torch.randperm(x.size(0), device=x.device)
    return lam * x + (1 - lam) * x[index], y, y[index], lam


def random_shift(x):
    dy, dx = torch.randint(-1, 2, (2,)).tolist()
    return torch.roll(x, shifts=(dy, dx), dims=(2, 3))


@torch.no_grad()
def evaluate(model, loader, accelerator):
    model.eval()
    correct = total = 0
    for images, targets in loader:
        preds, targets = accelerator.gather_for_metrics((model(images).argmax(-1), targets))
        correct += (preds == targets).sum().item()
        total += len(targets)
    return correct / total


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(cfg["seed"])
    rng = np.random.default_rng(cfg["seed"])
    train_loader = DataLoader(DigitDataset("train"), batch_size=cfg["batch_size"], shuffle=True, drop_last=True)
    test_loader = DataLoader(DigitDataset("test"), batch_size=128)
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg["lr"], momentum=0.9, weight_decay=5e-4, nesterov=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=cfg["epochs"] * len(train_loader))
    criterion = nn.CrossEntropyLoss(label_smoothing=cfg["smoothing"])
    model, optimizer, train_loader, test_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, test_loader, scheduler
    )
    ema = ModelEMA(accelerator.unwrap_model(model), cfg["ema_decay"])

    for epoch in range(cfg["epochs"]):
        model.train()
        for images, targets in train_loader:
            images, y_a, y_b, lam = mixup(random_shift(images), targets, cfg["mixup_alpha"], rng)
            outputs = model(images)
            loss = lam * criterion(outputs, y_a) + (1 - lam) * criterion(outputs, y_b)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            ema.update(accelerator.unwrap_model(model))
        acc, ema_acc = evaluate(model, test_loader, accelerator), evaluate(ema.module, test_loader, accelerator)
        accelerator.print(f"epoch {epoch}: loss {loss.item():.3f} acc {acc:.4f} ema {ema_acc:.4f}")
    accelerator.print(f"FINAL ema_accuracy={ema_acc:.4f}")


if __name__ == "__main__":
    main()
