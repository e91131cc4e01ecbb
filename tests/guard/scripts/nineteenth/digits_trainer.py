"""A Trainer class of our own: bf16 autocast, gradient accumulation, clipping, warm-up and cosine, averaged weights."""

import copy
import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import DataLoader, Dataset


@dataclass
class Config:
    epochs: int = 16
    batch_size: int = 32
    accumulate: int = 2
    lr: float = 3e-3
    weight_decay: float = 0.01
    max_norm: float = 1.0
    warmup_steps: int = 20
    ema_decay: float = 0.97
    seed: int = 0


class Digits(Dataset):
    def __init__(self, images, labels, train):
        self.images = torch.tensor(images, dtype=torch.float32).unsqueeze(1) / 16.0
        self.labels = torch.tensor(labels)
        self.train = train

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        image = self.images[i]
        if self.train:
            image = image + 0.15 * torch.randn(image.shape)
            image = torch.roll(image, shifts=int(torch.randint(-1, 2, (1,))), dims=-1)
        return image, self.labels[i]


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.conv2, self.bn2 = nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32)
        self.fc = nn.Linear(32 * 4, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)
        return self.fc(x.flatten(1))


class EMA:
    def __init__(self, model, decay):
        self.decay = decay
        self.module = copy.deepcopy(model).eval()
        for p in self.module.parameters():
            p.requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        for slow, fast in zip(self.module.parameters(), model.parameters()):
            slow.mul_(self.decay).add_(fast, alpha=1 - self.decay)
        for slow, fast in zip(self.module.buffers(), model.buffers()):
            slow.copy_(fast)


class Trainer:
    def __init__(self, config, model, train_set, val_set):
        self.config = config
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = model.to(self.device)
        self.ema = EMA(self.model, config.ema_decay)
        self.train_loader = DataLoader(train_set, batch_size=config.batch_size, shuffle=True, drop_last=True)
        self.val_loader = DataLoader(val_set, batch_size=200)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=config.weight_decay)
        self.total_steps = config.epochs * len(self.train_loader) // config.accumulate
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.lr_factor)

    def lr_factor(self, step):
        warmup = self.config.warmup_steps
        if step < warmup:
            return (step + 1) / warmup
        progress = (step - warmup) / max(1, self.total_steps - warmup)
        return 0.5 * (1 + math.cos(math.pi * progress))

    def train_epoch(self):
        self.model.train()
        losses = []
        for i, (images, labels) in enumerate(self.train_loader):
            images, labels = images.to(self.device), labels.to(self.device)
            with torch.autocast(self.device.type, dtype=torch.bfloat16):
                logits = self.model(images)
                loss = F.cross_entropy(logits.float(), labels)
            (loss / self.config.accumulate).backward()
            losses.append(loss.item())
            if (i + 1) % self.config.accumulate == 0:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_norm)
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
                self.scheduler.step()
                self.ema.update(self.model)
        return float(np.mean(losses))

    @torch.no_grad()
    def validate(self, model):
        model.eval()
        right = sum((model(x.to(self.device)).argmax(1).cpu() == y).sum().item() for x, y in self.val_loader)
        return right / len(self.val_loader.dataset)

    def fit(self):
        for epoch in range(self.config.epochs):
            loss = self.train_epoch()
            print(f"epoch {epoch + 1:2d} | loss {loss:.4f} | acc {self.validate(self.model):.4f} "
                  f"| ema {self.validate(self.ema.module):.4f} | lr {self.scheduler.get_last_lr()[0]:.5f}")  # fmt: skip
        return self.validate(self.ema.module)


if __name__ == "__main__":
    config = Config()
    torch.manual_seed(config.seed)
    np.random.seed(config.seed)
    X, y = load_digits(return_X_y=True)
    X = X.reshape(-1, 8, 8)
    X_train, X_val, y_train, y_val = train_test_split(X, y, test_size=0.3, random_state=42, stratify=y)
    trainer = Trainer(config, ConvNet(), Digits(X_train, y_train, train=True), Digits(X_val, y_val, train=False))
    print(f"FINAL ema_accuracy={trainer.fit():.4f}")
