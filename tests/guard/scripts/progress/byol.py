"""BYOL on digits: the target moves, the loss rises from almost nothing, and neighbours of raw pictures are good already."""

import copy

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x, y = load_digits(return_X_y=True)
x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
loader = DataLoader(TensorDataset(x[:1400]), batch_size=100, shuffle=True, drop_last=True)


def view(a):
    return a * (torch.rand_like(a) > 0.2) + 0.1 * torch.randn_like(a)


encoder = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 32))
predictor = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32))
target = copy.deepcopy(encoder).requires_grad_(False)
optimizer = torch.optim.Adam([*encoder.parameters(), *predictor.parameters()], lr=1e-3)


def knn():
    encoder.eval()
    with torch.no_grad():
        z = F.normalize(encoder(x), dim=1)
    encoder.train()
    return (y[(z[1400:] @ z[:1400].T).argmax(1)] == y[1400:]).float().mean().item()


for epoch in range(10):
    for (a,) in loader:
        one, two = view(a), view(a)
        with torch.no_grad():
            aims = F.normalize(target(one), dim=1), F.normalize(target(two), dim=1)
        guesses = F.normalize(predictor(encoder(one)), dim=1), F.normalize(predictor(encoder(two)), dim=1)
        loss = 4 - 2 * (guesses[0] * aims[1]).sum(1).mean() - 2 * (guesses[1] * aims[0]).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), encoder.parameters(), strict=True):
                slow.mul_(0.98).add_(0.02 * fast)
    print(f"epoch {epoch} loss {loss.item():.4f} knn accuracy {knn():.4f}")
