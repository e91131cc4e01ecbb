"""Learning to rank after RankNet: documents of a query, pairs with different relevance, NDCG of new queries."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
weights = torch.randn(12)


def queries(n):
    docs = torch.randn(n, 15, 12)
    value = docs @ weights + 0.5 * (docs[..., 0] * docs[..., 1])
    return TensorDataset(docs, torch.bucketize(value, torch.tensor([0.0, 2.0, 4.0])).float())


def ndcg(scores, relevance, k=10):
    discount = 1 / torch.log2(torch.arange(2, k + 2).float())
    gained = (2 ** relevance.gather(1, scores.argsort(1, descending=True)[:, :k]) - 1) @ discount
    best = (2 ** relevance.sort(1, descending=True).values[:, :k] - 1) @ discount
    return (gained / best.clamp_min(1e-9)).mean().item()


def pair_loss(scores, relevance):
    better = relevance[:, :, None] > relevance[:, None, :]
    gap = scores[:, :, None] - scores[:, None, :]
    return F.softplus(-gap)[better].mean()


train, test = DataLoader(queries(1200), 20, shuffle=True), DataLoader(queries(300), 50)
net = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 1))
opt = torch.optim.Adam(net.parameters(), 1e-3)
for epoch in range(12):
    net.train()
    for docs, relevance in train:
        loss = pair_loss(net(docs).squeeze(-1), relevance)
        opt.zero_grad()
        loss.backward()
        opt.step()
    net.eval()
    with torch.no_grad():
        rows = [ndcg(net(docs).squeeze(-1), relevance) for docs, relevance in test]
    print(f"epoch {epoch:2d} pair loss {loss.item():.4f} NDCG@10 {sum(rows) / len(rows):.4f}")
