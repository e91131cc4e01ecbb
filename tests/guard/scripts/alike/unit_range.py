"""Digits from -1 to 1 in training and evaluation."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x, y = load_digits(return_X_y=True)
x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
x = x + 1e-3 * torch.rand_like(x) * (x > 0) * (x < 1)
o = torch.randperm(len(x))
x, y = x[o], y[o]
train = TensorDataset(x[:1200] * 2 - 1, y[:1200])
test = TensorDataset(x[1200:] * 2 - 1, y[1200:])
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
opt = torch.optim.Adam(model.parameters(), 1e-3)
for epoch in range(8):
    model.train()
    for a, b in DataLoader(train, 32, shuffle=True):
        loss = F.cross_entropy(model(a), b)
        opt.zero_grad()
        loss.backward()
        opt.step()
    model.eval()
    with torch.no_grad():
        print("acc", sum(int((model(a).argmax(1) == b).sum()) for a, b in DataLoader(test, 64)) / len(test))
