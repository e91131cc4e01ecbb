"""Tabular regression: an MLP, scaled features, early stopping on the best validation loss, weights restored at the end."""

import copy

import numpy as np
import torch
from sklearn.datasets import load_diabetes
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x, y = load_diabetes(return_X_y=True)
order = np.random.default_rng(0).permutation(len(x))
x, y = x[order].astype(np.float32) * 20, ((y - y.mean()) / y.std())[order].astype(np.float32)
train = TensorDataset(torch.from_numpy(x[:350]), torch.from_numpy(y[:350]))
valid = TensorDataset(torch.from_numpy(x[350:]), torch.from_numpy(y[350:]))
model = nn.Sequential(nn.Linear(10, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-4)
criterion = nn.MSELoss()
best, best_weights, patience = float("inf"), None, 0
for epoch in range(40):
    model.train()
    for a, b in DataLoader(train, 32, shuffle=True):
        optimizer.zero_grad()
        loss = criterion(model(a).squeeze(1), b)
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        val = np.mean([criterion(model(a).squeeze(1), b).item() for a, b in DataLoader(valid, 64)])
    print(f"epoch {epoch} val mse {val:.4f}")
    if val < best:
        best, best_weights, patience = val, copy.deepcopy(model.state_dict()), 0
    else:
        patience += 1
    if patience > 8:
        break
model.load_state_dict(best_weights)
