"""Matrix factorisation of ratings without an optimiser: the factors are moved by hand."""

import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
n_users, n_items, rank = 200, 150, 6
truth = torch.randn(n_users, 3) @ torch.randn(3, n_items) / 3**0.5
pairs = torch.randperm(n_users * n_items)[:14000]
u, i = pairs // n_items, pairs % n_items
r = (3 + truth[u, i] + 0.2 * torch.randn(len(u))).clamp(1, 5)
train = DataLoader(TensorDataset(u[:12000], i[:12000], r[:12000]), batch_size=256, shuffle=True)
test = DataLoader(TensorDataset(u[12000:], i[12000:], r[12000:]), batch_size=500)


class Factors(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.user = torch.nn.Embedding(n_users, rank)
        self.item = torch.nn.Embedding(n_items, rank)
        self.bias = torch.nn.Parameter(torch.tensor(3.0))
        torch.nn.init.normal_(self.user.weight, std=0.3)
        torch.nn.init.normal_(self.item.weight, std=0.3)

    def forward(self, u, i):
        return self.bias + (self.user(u) * self.item(i)).sum(1)


model = Factors()
for epoch in range(15):
    for a, b, rating in train:
        loss = ((model(a, b) - rating) ** 2).mean()
        for p in model.parameters():
            p.grad = None
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= (4.0 if p.dim() else 0.05) * p.grad
    with torch.no_grad():
        squared = sum(((model(a, b) - rating) ** 2).sum().item() for a, b, rating in test)
    print(f"Epoch {epoch + 1}/15  test RMSE = {(squared / 2000) ** 0.5:.4f}")
