"""Node classification like GCN on Cora: modules of sympy, their words as features, imports as edges, sub-packages as classes."""

import copy
import os
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import sympy
import torch
import torch.nn as nn
import torch.nn.functional as F

ROOT = Path(sympy.__file__).parent
CLASSES = [
    "core",
    "functions",
    "matrices",
    "ntheory",
    "physics",
    "polys",
    "printing",
    "sets",
    "solvers",
    "stats",
    "geometry",
    "combinatorics",
]


def load_data(seed, num_features=600, per_class=10):
    rng = np.random.default_rng(seed)
    files = sorted(
        p for c in CLASSES for p in (ROOT / c).rglob("*.py") if "tests" not in p.parts and p.stat().st_size > 1500
    )
    names = [".".join(("sympy", *p.relative_to(ROOT).with_suffix("").parts)) for p in files]
    index = {n: i for i, n in enumerate(names)}
    texts = [p.read_text(encoding="utf-8") for p in files]
    edges = set()
    for i, text in enumerate(texts):
        for target in re.findall(r"^\s*(?:from|import) (sympy\.[\w.]+)", text, re.M):
            j = index.get(target)
            if j is not None and j != i:
                edges |= {(i, j), (j, i)}
    hidden = {*CLASSES, "sympy"}
    words = [
        Counter(re.findall(r"[a-z]{3,}", re.sub(r"^\s*(from|import) .*$", "", t, flags=re.M).lower())) for t in texts
    ]
    df = Counter(w for doc in words for w in doc if w not in hidden)
    vocab = [w for w, n in df.most_common() if n < 0.5 * len(files)][:num_features]
    x = torch.tensor([[float(w in doc) for w in vocab] for doc in words])
    x = x / x.sum(1, keepdim=True).clamp(min=1)
    y = torch.tensor([CLASSES.index(p.relative_to(ROOT).parts[0]) for p in files])
    order = torch.from_numpy(rng.permutation(len(files)))
    train_mask = torch.zeros(len(files), dtype=torch.bool)
    for c in range(len(CLASSES)):
        train_mask[order[y[order] == c][:per_class]] = True
    rest = order[~train_mask[order]]
    val_mask, test_mask = torch.zeros_like(train_mask), torch.zeros_like(train_mask)
    val_mask[rest[:100]] = True
    test_mask[rest[100:]] = True
    edge_index = torch.tensor(sorted(edges)).t()
    return SimpleNamespace(
        x=x, y=y, edge_index=edge_index, train_mask=train_mask, val_mask=val_mask, test_mask=test_mask
    )


def normalised_adjacency(edge_index, n):
    loops = torch.arange(n).repeat(2, 1)
    row, col = torch.cat([edge_index, loops], dim=1)
    deg_inv_sqrt = torch.zeros(n).scatter_add_(0, row, torch.ones(len(row))).pow(-0.5)
    return torch.sparse_coo_tensor(torch.stack([row, col]), deg_inv_sqrt[row] * deg_inv_sqrt[col], (n, n)).coalesce()


class GCN(nn.Module):
    def __init__(self, in_channels, hidden, out_channels, dropout=0.5):
        super().__init__()
        self.lin1 = nn.Linear(in_channels, hidden, bias=False)
        self.lin2 = nn.Linear(hidden, out_channels, bias=False)
        self.bias1, self.bias2 = nn.Parameter(torch.zeros(hidden)), nn.Parameter(torch.zeros(out_channels))
        self.dropout = dropout

    def forward(self, x, adj):
        x = F.dropout(x, self.dropout, training=self.training)
        x = F.relu(torch.sparse.mm(adj, self.lin1(x)) + self.bias1)
        x = F.dropout(x, self.dropout, training=self.training)
        return torch.sparse.mm(adj, self.lin2(x)) + self.bias2


def train(model, data, optimizer):
    model.train()
    optimizer.zero_grad()
    out = model(data.x, data.adj)
    loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def test(model, data):
    model.eval()
    pred = model(data.x, data.adj).argmax(dim=-1)
    return [(pred[m] == data.y[m]).float().mean().item() for m in (data.train_mask, data.val_mask, data.test_mask)]


def main():
    seed = int(os.environ.get("SEED", "0"))
    torch.manual_seed(seed)
    data = load_data(seed)
    data.adj = normalised_adjacency(data.edge_index, len(data.x))
    print(f"{len(data.x)} nodes, {data.edge_index.size(1)} edges, {int(data.train_mask.sum())} labelled")
    model = GCN(data.x.size(1), 64, len(CLASSES))
    optimizer = torch.optim.Adam(
        [
            {"params": [model.lin1.weight, model.bias1], "weight_decay": 5e-4},
            {"params": [model.lin2.weight, model.bias2], "weight_decay": 0.0},
        ],
        lr=0.01,
    )
    best_val, best_state, patience = 0.0, None, 0
    for epoch in range(1, 1001):
        loss = train(model, data, optimizer)
        train_acc, val_acc, _ = test(model, data)
        if val_acc > best_val:
            best_val, best_state, patience = val_acc, copy.deepcopy(model.state_dict()), 0
        else:
            patience += 1
        if epoch % 50 == 0:
            print(f"epoch {epoch} loss {loss:.4f} train {train_acc:.4f} val {val_acc:.4f}")
        if patience >= 200:
            break
    model.load_state_dict(best_state)
    print(f"test accuracy {test(model, data)[2]:.4f}")


if __name__ == "__main__":
    main()
