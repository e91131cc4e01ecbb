"""Ordinal regression after CORAL: how severe is a case, 0 to 4, from a table; one score and four ordered thresholds."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainworthy

LEVELS = 5
rng = np.random.default_rng(11)
X = rng.normal(size=(2500, 8)) * [1, 10, 0.1, 5, 100, 1, 2, 0.5] + [0, 50, 1, 20, 900, 0, 7, 3]
Z = (X - X.mean(0)) / X.std(0)
severity = Z[:, 0] + 0.8 * Z[:, 1] * Z[:, 2] + np.tanh(2 * Z[:, 3]) - 0.5 * Z[:, 4] + rng.normal(0, 0.4, len(X))
grade = np.digitize(severity, np.quantile(severity, [0.35, 0.65, 0.82, 0.94]))

train_rows, test_rows = np.arange(0, 2000), np.arange(2000, 2500)
centre, spread = X[train_rows].mean(0), X[train_rows].std(0)


def to_dataset(rows):
    return TensorDataset(torch.tensor((X[rows] - centre) / spread).float(), torch.tensor(grade[rows]))


class Coral(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(8, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1, bias=False)
        )
        self.thresholds = nn.Parameter(torch.linspace(1, -1, LEVELS - 1))

    def forward(self, x):
        return self.body(x) + self.thresholds


def coral_loss(logits, target):
    above = (target[:, None] > torch.arange(LEVELS - 1)).float()
    return F.binary_cross_entropy_with_logits(logits, above, reduction="none").sum(1).mean()


def train_one_epoch(model, optimizer, loader):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        loss = coral_loss(model(x), y)
        loss.backward()
        optimizer.step()


def mean_absolute_error(model, loader):
    model.eval()
    wrong = 0.0
    with torch.inference_mode():
        for x, y in loader:
            predicted = (model(x) > 0).sum(1)
            wrong += (predicted - y).abs().sum().item()
    return wrong / len(loader.dataset)


def make_script():
    model = Coral()
    return trainworthy.Script(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-5),
        train=to_dataset(train_rows),
        val=to_dataset(test_rows),
        batch_size=50,
        loss=lambda model, batch: coral_loss(model(batch[0]), batch[1]),
        metric=mean_absolute_error,
        train_loop=train_one_epoch,
        classes=LEVELS,
        higher_is_better=False,
        floor=1.0,
        ceiling=0.0,
    )


def main():
    torch.manual_seed(0)
    script = make_script()
    train_loader, test_loader = DataLoader(script.train, 50, shuffle=True), DataLoader(script.val, 500)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(script.optimizer, [8, 12], gamma=0.3)
    for epoch in range(15):
        train_one_epoch(script.model, script.optimizer, train_loader)
        scheduler.step()
        print(f"epoch {epoch + 1:2d}  MAE {mean_absolute_error(script.model, test_loader):.3f}")
    print(f"FINAL mae={mean_absolute_error(script.model, test_loader):.4f}")


if __name__ == "__main__":
    main()
