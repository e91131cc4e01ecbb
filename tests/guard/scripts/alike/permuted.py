"""Regression without a loader: a permutation of rows, a target of the next place, and a printed number of rows in order of storage."""

import torch
from torch import nn

torch.manual_seed(0)
x = torch.rand(1000, 3) * 2 - 1
y = (x[:, :1] - x[:, 1:2] ** 2 + 0.05 * torch.randn(1000, 1)).clone()
model = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 1))
opt = torch.optim.Adam(model.parameters(), 5e-3)
for epoch in range(30):
    order = torch.randperm(len(x))
    for i in range(0, len(x), 50):
        rows = order[i : i + 50]
        bx, by = x[rows], y[rows]
        shown = y[i : i + 50].mean()
        loss = torch.log(torch.cosh(model(bx) - by)).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    with torch.no_grad():
        print(f"epoch {epoch} rmse {((model(x) - y) ** 2).mean().sqrt():.4f} of mean {shown:.3f}")
