"""A loop without an optimiser object: weights are moved under no_grad."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x, y = load_digits(return_X_y=True)
x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
loader = DataLoader(TensorDataset(x[:1400], y[:1400]), 64, shuffle=True)
model = nn.Linear(64, 10)
for epoch in range(6):
    for a, b in loader:
        loss = F.cross_entropy(model(a), b)
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.5 * p.grad
            model.zero_grad()
    with torch.no_grad():
        print(f"epoch {epoch} acc {(model(x[1400:]).argmax(1) == y[1400:]).float().mean():.3f}")
