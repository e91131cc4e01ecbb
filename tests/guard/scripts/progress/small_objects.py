"""Segmentation of small spots: for many steps the net answers "background" everywhere, and Dice is 0 after it was not."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)


def spots(n):
    masks = torch.zeros(n, 1, 24, 24)
    for mask in masks:
        a, b = torch.randint(2, 20, (2,)).tolist()
        mask[:, a : a + 3, b : b + 3] = 1
    return TensorDataset(0.6 * masks + 0.35 * torch.randn(n, 1, 24, 24), masks)


train, val = DataLoader(spots(400), 10, shuffle=True), DataLoader(spots(100), 20)
net = nn.Sequential(
    nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 1, 1)
)
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
for epoch in range(6):
    net.train()
    for x, y in train:
        loss = F.binary_cross_entropy_with_logits(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    net.eval()
    overlap = total = 0.0
    with torch.no_grad():
        for x, y in val:
            found = (net(x) > 0).float()
            overlap += 2 * (found * y).sum().item()
            total += (found + y).sum().item()
    print(f"epoch {epoch}: loss {loss.item():.4f}, val dice {overlap / total:.4f}")
