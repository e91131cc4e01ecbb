"""Link prediction: who knows whom in a made-up network of groups; two layers of mean aggregation, dot-product decoder, AUC."""

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.metrics import roc_auc_score

torch.manual_seed(0)
rng = np.random.default_rng(0)
N, GROUPS, FEATURES = 240, 6, 20
group = rng.integers(0, GROUPS, N)
centres = rng.standard_normal((GROUPS, FEATURES))
features = centres[group] * 0.5 + rng.standard_normal((N, FEATURES))
chance = np.where(group[:, None] == group[None, :], 0.22, 0.01)
upper = np.triu(rng.random((N, N)) < chance, k=1)
edges = np.argwhere(upper)
rng.shuffle(edges)
n_test = len(edges) // 5
test_pos, train_pos = torch.tensor(edges[:n_test].T), torch.tensor(edges[n_test:].T)
x = torch.tensor(features, dtype=torch.float32)
x = (x - x.mean(dim=0)) / x.std(dim=0)


def adjacency(pairs):
    a = torch.zeros(N, N)
    a[pairs[0], pairs[1]] = 1
    a[pairs[1], pairs[0]] = 1
    a.fill_diagonal_(1)
    return a / a.sum(dim=1, keepdim=True)


known = torch.tensor(upper | upper.T)


def negatives(n):
    """Pairs that are no link of the network."""
    found = []
    while len(found) < n:
        u, v = torch.randint(0, N, (2,)).tolist()
        if u != v and not known[u, v]:
            found.append((u, v))
    return torch.tensor(found).T


class Sage(nn.Module):
    def __init__(self, n_in, hidden, n_out):
        super().__init__()
        self.self1, self.near1 = nn.Linear(n_in, hidden), nn.Linear(n_in, hidden, bias=False)
        self.self2, self.near2 = nn.Linear(hidden, n_out), nn.Linear(hidden, n_out, bias=False)

    def encode(self, x, adj):
        h = F.relu(self.self1(x) + self.near1(adj @ x))
        h = F.dropout(h, 0.3, training=self.training)
        return self.self2(h) + self.near2(adj @ h)

    def decode(self, z, pairs):
        return (z[pairs[0]] * z[pairs[1]]).sum(dim=-1)


adj = adjacency(train_pos)
test_neg = negatives(test_pos.shape[1])
model = Sage(FEATURES, 32, 16)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=1e-3)


def test_auc():
    model.eval()
    with torch.no_grad():
        z = model.encode(x, adj)
        scores = model.decode(z, torch.cat([test_pos, test_neg], dim=1)).sigmoid()
    labels = torch.cat([torch.ones(test_pos.shape[1]), torch.zeros(test_neg.shape[1])])
    return roc_auc_score(labels.numpy(), scores.numpy())


for epoch in range(1, 61):
    model.train()
    optimizer.zero_grad()
    z = model.encode(x, adj)
    train_neg = negatives(train_pos.shape[1])
    logits = model.decode(z, torch.cat([train_pos, train_neg], dim=1))
    target = torch.cat([torch.ones(train_pos.shape[1]), torch.zeros(train_neg.shape[1])])
    loss = F.binary_cross_entropy_with_logits(logits, target)
    loss.backward()
    optimizer.step()
    if epoch % 10 == 0:
        print(f"epoch {epoch:3d} loss {loss.item():.4f} test AUC {test_auc():.4f}")
print(f"FINAL auc={test_auc():.4f}")
