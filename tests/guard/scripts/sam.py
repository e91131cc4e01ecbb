"""Sharpness-aware minimisation: two backward() per step, weights perturbed in between."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)


class SAM(torch.optim.Optimizer):
    def __init__(self, params, base, rho=0.05, **kwargs):
        super().__init__(params, {"rho": rho, **kwargs})
        self.base_optimizer = base(self.param_groups, **kwargs)

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        norm = torch.stack([p.grad.norm() for g in self.param_groups for p in g["params"]]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                e = p.grad * group["rho"] / (norm + 1e-12)
                p.add_(e)
                self.state[p]["e"] = e
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(self.state[p]["e"])
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()


x, y = load_digits(return_X_y=True)
x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
train_loader = DataLoader(TensorDataset(x[:1400], y[:1400]), 64, shuffle=True)
val_loader = DataLoader(TensorDataset(x[1400:], y[1400:]), 128)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
for epoch in range(8):
    model.train()
    for a, b in train_loader:
        F.cross_entropy(model(a), b).backward()
        optimizer.first_step(zero_grad=True)
        F.cross_entropy(model(a), b).backward()
        optimizer.second_step(zero_grad=True)
    model.eval()
    with torch.no_grad():
        acc = sum((model(a).argmax(1) == b).sum().item() for a, b in val_loader) / 397
    print(f"epoch {epoch} acc {acc:.3f}")
