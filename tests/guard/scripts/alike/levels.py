"""Inputs of few values: training erases a part of them, the evaluation does not."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x, y = load_digits(return_X_y=True)
x, y = (torch.tensor(x, dtype=torch.float32) > 7).float() * 2 - 1, torch.tensor(y)
order = torch.randperm(len(x))
x, y = x[order], y[order]
train, test = TensorDataset(x[:1200], y[:1200]), TensorDataset(x[1200:], y[1200:])
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
opt = torch.optim.Adam(model.parameters(), 1e-3)
best_loss, best_acc, state = float("inf"), 0.0, None
for epoch in range(12):
    model.train()
    for a, b in DataLoader(train, 32, shuffle=True):
        a = a * (torch.rand_like(a) > 0.2)
        loss = F.cross_entropy(model(a), b)
        opt.zero_grad()
        loss.backward()
        opt.step()
    model.eval()
    right = total = 0.0
    with torch.no_grad():
        for a, b in DataLoader(test, 64):
            out = model(a)
            right += int((out.argmax(1) == b).sum())
            total += F.cross_entropy(out, b, reduction="sum").item()
    acc, val_loss = right / len(test), total / len(test)
    if val_loss < best_loss:
        best_loss, state = val_loss, {k: v.clone() for k, v in model.state_dict().items()}
    best_acc = max(best_acc, acc)
    print(f"epoch {epoch} val loss {val_loss:.4f} acc {acc:.4f} best {best_acc:.4f}")
model.load_state_dict(state)
