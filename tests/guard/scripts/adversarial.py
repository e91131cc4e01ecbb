"""Adversarial training with FGSM: a backward() for the input's gradient, zeroed, then one for the weights."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x, y = load_digits(return_X_y=True)
x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
train_loader = DataLoader(TensorDataset(x[:1400], y[:1400]), 64, shuffle=True)
test_loader = DataLoader(TensorDataset(x[1400:], y[1400:]), 100)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CyclicLR(optimizer, base_lr=0.01, max_lr=0.2, step_size_up=60)


def attack(data, target, eps=0.05):
    delta = torch.zeros_like(data).uniform_(-eps, eps).requires_grad_(True)
    F.cross_entropy(model(data + delta), target).backward()
    moved = (delta + eps * delta.grad.sign()).clamp(-eps, eps).detach()
    model.zero_grad()
    return moved


for epoch in range(8):
    model.train()
    for data, target in train_loader:
        delta = attack(data, target)
        loss = F.cross_entropy(model(data + delta), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
    model.eval()
    clean = robust = 0
    for data, target in test_loader:
        delta = attack(data, target)
        with torch.no_grad():
            clean += (model(data).argmax(1) == target).sum().item()
            robust += (model(data + delta).argmax(1) == target).sum().item()
    print(f"epoch {epoch} clean acc {clean / 397:.3f} robust {robust / 397:.3f}")
