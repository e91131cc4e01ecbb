"""timm's shape: mixup drawn by numpy in the loop, soft targets, batches prefetched into a list, SWA's average with update_bn."""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0), np.random.seed(0)
x, y = load_digits(return_X_y=True)
x, y = torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(y)
train_loader = DataLoader(TensorDataset(x[:1400], y[:1400]), 50, shuffle=True)
val_loader = DataLoader(TensorDataset(x[1400:], y[1400:]), 100)
model = nn.Sequential(
    nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Dropout(0.1), nn.Linear(576, 10)
)
average = AveragedModel(model, avg_fn=lambda a, b, n: 0.9 * a + 0.1 * b)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, epochs=8, steps_per_epoch=len(train_loader))


def validate(model):
    model.eval()
    with torch.no_grad():
        return sum((model(a).argmax(1) == b).sum().item() for a, b in val_loader) / 397


for epoch in range(8):
    model.train()
    batches = list(train_loader)
    for a, b in batches:
        lam = np.random.beta(0.8, 0.8)
        order = torch.randperm(len(a))
        soft = F.one_hot(b, 10).float()
        mixed = lam * a + (1 - lam) * a[order]
        goal = lam * soft + (1 - lam) * soft[order]
        loss = F.cross_entropy(model(mixed), goal)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        average.update_parameters(model)
    update_bn(train_loader, average)
    print(f"epoch {epoch} acc {validate(model):.3f} average {validate(average):.3f}")
