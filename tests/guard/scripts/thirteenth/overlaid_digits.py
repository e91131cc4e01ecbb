"""Which digits are in the picture? One to three digits laid over each other, one logit each, pos_weight, warm restarts by fractions of an epoch."""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset

import trainworthy

digits = load_digits()
images, labels = digits.images.astype(np.float32) / 16, digits.target
order = np.random.RandomState(5).permutation(len(images))


class Overlaid(Dataset):
    """Pictures of 12 x 12 pixels, drawn once."""

    def __init__(self, pool, n, seed):
        rng = np.random.RandomState(seed)
        self.x, self.y = np.zeros((n, 1, 12, 12), np.float32), np.zeros((n, 10), np.float32)
        for i in range(n):
            for j in rng.choice(pool, rng.randint(1, 4), replace=False):
                top, left = rng.randint(0, 5, 2)
                view = self.x[i, 0, top : top + 8, left : left + 8]
                np.maximum(view, images[j], out=view)
                self.y[i, labels[j]] = 1

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return torch.from_numpy(self.x[i]), torch.from_numpy(self.y[i])


train_set, val_set = Overlaid(order[:1400], 4000, 0), Overlaid(order[1400:], 600, 1)
frequency = torch.from_numpy(train_set.y.mean(0))
criterion = nn.BCEWithLogitsLoss(pos_weight=(1 - frequency) / frequency)


def build():
    return nn.Sequential(
        nn.Conv2d(1, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(), nn.Conv2d(24, 48, 3, padding=1), nn.BatchNorm2d(48), nn.ReLU(),
        nn.MaxPool2d(2), nn.Conv2d(48, 64, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Dropout(0.25), nn.Linear(64 * 36, 10),
    )  # fmt: skip


def train_epoch(model, optimizer, batches, scheduler=None, epoch=0):
    model.train()
    for i, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step(epoch + i / len(batches))


def macro_f1(model, loader):
    model.eval()
    true_positive, predicted, positive = torch.zeros(10), torch.zeros(10), torch.zeros(10)
    with torch.no_grad():
        for x, y in loader:
            answer = (torch.sigmoid(model(x)) > 0.5).float()
            true_positive += (answer * y).sum(0)
            predicted += answer.sum(0)
            positive += y.sum(0)
    return (2 * true_positive / (predicted + positive).clamp(min=1)).mean().item()


def make_script():
    model = build()
    return trainworthy.Script(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=2e-3),
        train=train_set,
        val=val_set,
        batch_size=64,
        loss=lambda model, batch: criterion(model(batch[0]), batch[1]),
        metric=macro_f1,
        train_loop=train_epoch,
        floor=0.3,
    )


if __name__ == "__main__":
    torch.manual_seed(0)
    train_loader, val_loader = DataLoader(train_set, 64, shuffle=True), DataLoader(val_set, 200)
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=2, T_mult=2)
    for epoch in range(6):
        train_epoch(model, optimizer, train_loader, scheduler, epoch)
        print("epoch", epoch, "macro F1", round(macro_f1(model, val_loader), 4))
    print(f"FINAL f1={macro_f1(model, val_loader):.4f}")
