"""Few samples and many steps: the validation loss ends far above that of an untrained net, its best was below."""

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(560, 30)
y = (x[:, :3].sum(1) + 1.5 * torch.randn(560) > 0).long()
train = DataLoader(TensorDataset(x[:60], y[:60]), batch_size=10, shuffle=True)
val = DataLoader(TensorDataset(x[60:], y[60:]), batch_size=100)
model = nn.Sequential(nn.Linear(30, 128), nn.ReLU(), nn.Linear(128, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
best, kept = float("inf"), None
for epoch in range(40):
    model.train()
    for a, b in train:
        loss = F.cross_entropy(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        val_loss = sum(F.cross_entropy(model(a), b).item() for a, b in val) / len(val)
    if val_loss < best:
        best, kept = val_loss, copy.deepcopy(model.state_dict())
    print(f"epoch={epoch} train_loss={loss.item():.4f} val_loss={val_loss:.4f} best={best:.4f}")
