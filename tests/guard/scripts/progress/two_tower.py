"""Retrieval with two towers: users and items meet in one space, the other items of a batch are the negatives."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
latent = torch.randn(3000, 6)
view_a, view_b = torch.randn(6, 24), torch.randn(6, 24)
users = latent @ view_a + 0.3 * torch.randn(3000, 24)
items = latent @ view_b + 0.3 * torch.randn(3000, 24)


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 16))
        self.item = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 16))

    def forward(self, a, b):
        return F.normalize(self.user(a), dim=1), F.normalize(self.item(b), dim=1)


def evaluate(model):
    model.eval()
    with torch.no_grad():
        a, b = model(users[2500:], items[2500:])
    order = (a @ b.T).argsort(1, descending=True)
    place = (order == torch.arange(500)[:, None]).int().argmax(1)
    return {"hits@10": round((place < 10).float().mean().item(), 4), "mrr": round((1 / (place + 1)).mean().item(), 4)}


loader = DataLoader(TensorDataset(users[:2500], items[:2500]), batch_size=100, shuffle=True, drop_last=True)
model = Towers()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for epoch in range(10):
    model.train()
    for a, b in loader:
        u, v = model(a, b)
        logits = -torch.cdist(u, v) / 0.1
        loss = F.cross_entropy(logits, torch.arange(len(a)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(epoch, {"loss": round(loss.item(), 4), **evaluate(model)})
