"""A message passing network without libraries: boiling points of made-up molecules, graphs of a batch put together."""

import random

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader

SEED = 0
ATOMS = ["C", "N", "O", "F"]
BOND_ENERGY = np.array([[3, 8, 12, 5], [8, 6, 9, 4], [12, 9, 2, 1], [5, 4, 1, 0]], dtype=float)
random.seed(SEED)
torch.manual_seed(SEED)


def make_molecule(rng):
    n = rng.randint(5, 14)
    atoms = rng.choices(range(4), weights=[6, 2, 2, 1], k=n)
    bonds = [(rng.randrange(max(0, i - 3), i), i) for i in range(1, n)]
    if n > 7:
        bonds.append((0, rng.randrange(4, n)))
    kinds = [rng.choices([0, 1], weights=[3, 1])[0] for _ in bonds]  # single or double
    point = 4.0 * n + sum(BOND_ENERGY[atoms[i], atoms[j]] * (1 - 0.8 * k) for (i, j), k in zip(bonds, kinds))
    return atoms, bonds, kinds, point + rng.gauss(0, 1.0)


def to_graph(molecule):
    atoms, bonds, kinds, point = molecule
    x = F.one_hot(torch.tensor(atoms), len(ATOMS)).float()
    forward = torch.tensor(bonds).T
    edge_index = torch.cat([forward, forward.flip(0)], dim=1)
    edge_attr = F.one_hot(torch.tensor(kinds), 2).float().repeat(2, 1)
    return x, edge_index, edge_attr, point


def collate(graphs):
    xs, edges, attrs, batch, points = [], [], [], [], []
    offset = 0
    for k, (x, edge_index, edge_attr, point) in enumerate(graphs):
        xs.append(x)
        edges.append(edge_index + offset)
        attrs.append(edge_attr)
        batch.append(torch.full((len(x),), k))
        points.append(point)
        offset += len(x)
    return torch.cat(xs), torch.cat(edges, dim=1), torch.cat(attrs), torch.cat(batch), torch.tensor(points)


class MPNN(nn.Module):
    def __init__(self, width=48, layers=2):
        super().__init__()
        self.embed = nn.Linear(len(ATOMS), width)
        self.message = nn.ModuleList([nn.Linear(2 * width + 2, width) for _ in range(layers)])
        self.update = nn.ModuleList([nn.Linear(2 * width, width) for _ in range(layers)])
        self.readout = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, x, edge_index, edge_attr, batch):
        h = self.embed(x)
        source, target = edge_index
        for message, update in zip(self.message, self.update):
            m = F.relu(message(torch.cat([h[source], h[target], edge_attr], dim=-1)))
            gathered = torch.zeros_like(h).index_add_(0, target, m)
            h = h + F.relu(update(torch.cat([h, gathered], dim=-1)))
        pooled = h.new_zeros(int(batch.max()) + 1, h.size(1)).index_add_(0, batch, h)
        return self.readout(pooled).squeeze(-1)


rng = random.Random(7)
molecules = [to_graph(make_molecule(rng)) for _ in range(2400)]
train_graphs, test_graphs = molecules[:2000], molecules[2000:]
points = np.array([g[3] for g in train_graphs])
mean, std = points.mean(), points.std()
train_loader = DataLoader(train_graphs, batch_size=32, shuffle=True, collate_fn=collate)
test_loader = DataLoader(test_graphs, batch_size=100, collate_fn=collate)

model = MPNN()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.85)


@torch.no_grad()
def mean_absolute_error():
    model.eval()
    errors = []
    for x, edge_index, edge_attr, batch, y in test_loader:
        pred = model(x, edge_index, edge_attr, batch) * std + mean
        errors.append((pred - y).abs())
    return torch.cat(errors).mean().item()


for epoch in range(15):
    model.train()
    total = 0.0
    for x, edge_index, edge_attr, batch, y in train_loader:
        optimizer.zero_grad()
        pred = model(x, edge_index, edge_attr, batch)
        loss = F.mse_loss(pred, (y - mean) / std)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(y)
    scheduler.step()
    print(f"epoch {epoch + 1}: mse {total / len(train_graphs):.4f}, test mae {mean_absolute_error():.2f} K")
print(f"FINAL mae_kelvin={mean_absolute_error():.3f}")
