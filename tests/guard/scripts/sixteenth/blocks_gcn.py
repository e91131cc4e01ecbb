"""A two-layer GCN in plain PyTorch: nodes of a random graph with four communities, twenty labelled nodes in each."""

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

SEED = 0
torch.manual_seed(SEED)
rng = np.random.RandomState(SEED)

N, CLASSES = 800, 4
labels = rng.randint(CLASSES, size=N)
popularity = rng.pareto(2.0, size=N) + 0.3
same = labels[:, None] == labels[None, :]
chance = np.clip(np.where(same, 0.012, 0.0015) * popularity[:, None] * popularity[None, :], 0, 1)
upper = np.triu(rng.rand(N, N) < chance, 1)
adjacency = (upper | upper.T).astype(np.float32)
features = np.eye(CLASSES, 24)[labels] * 1.5 + rng.randn(N, 24)

order = rng.permutation(N)
train_idx, test_idx = order[:80], order[300:]
train_mask = torch.zeros(N, dtype=torch.bool)
train_mask[train_idx] = True
test_mask = torch.zeros(N, dtype=torch.bool)
test_mask[test_idx] = True


def normalize(adj):
    adj = adj + np.eye(len(adj), dtype=np.float32)
    d_inv_sqrt = adj.sum(1) ** -0.5
    return d_inv_sqrt[:, None] * adj * d_inv_sqrt[None, :]


A = torch.tensor(normalize(adjacency))
X = torch.tensor(features, dtype=torch.float32)
y = torch.tensor(labels)


class GraphConvolution(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)

    def forward(self, x, adj):
        return adj @ self.linear(x)


class GCN(nn.Module):
    def __init__(self, nfeat, nhid, nclass, dropout=0.5):
        super().__init__()
        self.gc1 = GraphConvolution(nfeat, nhid)
        self.gc2 = GraphConvolution(nhid, nclass)
        self.dropout = dropout

    def forward(self, x, adj):
        x = F.relu(self.gc1(x, adj))
        x = F.dropout(x, self.dropout, training=self.training)
        return F.log_softmax(self.gc2(x, adj), dim=1)


model = GCN(24, 16, CLASSES)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
for epoch in range(200):
    model.train()
    optimizer.zero_grad()
    output = model(X, A)
    loss = F.nll_loss(output[train_mask], y[train_mask])
    loss.backward()
    optimizer.step()
    if epoch % 50 == 0:
        print(f"Epoch {epoch} loss {loss.item():.4f}")

model.eval()
with torch.no_grad():
    pred = model(X, A).argmax(1)
print(f"FINAL accuracy={(pred[test_mask] == y[test_mask]).float().mean().item():.4f}")
