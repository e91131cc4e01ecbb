"""Regression on ten standardised columns, with noise added to the inputs of training."""

import torch
from sklearn.datasets import load_diabetes
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x, y = load_diabetes(return_X_y=True, scaled=False)
x, y = torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)[:, None] / 100
mean, std = x[:300].mean(0), x[:300].std(0)
train = TensorDataset((x[:300] - mean) / std, y[:300])
test = TensorDataset((x[300:] - mean) / std, y[300:])
model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
opt = torch.optim.Adam(model.parameters(), 1e-3)
for epoch in range(8):
    model.train()
    for a, b in DataLoader(train, 16, shuffle=True):
        a = a + 0.1 * torch.randn_like(a)
        loss = ((model(a) - b) ** 2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    model.eval()
    with torch.no_grad():
        print("test", sum(((model(a) - b) ** 2).sum().item() for a, b in DataLoader(test, 64)) / len(test))
