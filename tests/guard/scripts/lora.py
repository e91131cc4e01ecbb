"""Low-rank adapters on a frozen base that was never loaded from a file: B starts at zero, so A has no gradient at first."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(0)
SIZE = 24


class Text(Dataset):
    def __init__(self, lo, hi):
        with open(argparse.__file__, "rb") as file:
            self.ids = torch.tensor(list(file.read()[lo:hi])) % 128

    def __len__(self):
        return len(self.ids) // SIZE - 1

    def __getitem__(self, i):
        row = self.ids[i * SIZE : i * SIZE + SIZE + 1]
        return row[:-1], row[1:]


class Adapted(nn.Module):
    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + x @ self.a.t() @ self.b.t()


class Model(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.embed = nn.Embedding(128, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, 128)

    def forward(self, x):
        return self.out(self.rnn(self.embed(x))[0])


model = Model().requires_grad_(False)
model.out = Adapted(model.out)
trained = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-2)
train_loader, val_loader = DataLoader(Text(0, 60000), 32, shuffle=True), DataLoader(Text(60000, 80000), 32)
for epoch in range(3):
    model.train()
    for x, y in train_loader:
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        val = sum(F.cross_entropy(model(x).flatten(0, 1), y.flatten()).item() for x, y in val_loader) / len(val_loader)
    print(f"epoch {epoch} val {val:.3f}")
    torch.save({k: v for k, v in model.state_dict().items() if k.endswith((".a", ".b"))}, "adapter.pt")
