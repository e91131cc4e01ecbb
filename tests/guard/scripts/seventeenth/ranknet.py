"""RankNet: order the documents of a query by pairwise logistic loss; NDCG@5 on held-out queries."""

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
rng = np.random.default_rng(0)
N_FEATURES, MAX_DOCS = 12, 20
weights = rng.standard_normal(N_FEATURES)


def queries(n):
    """Lists of different length, padded; relevance 0-3 by the rank within the query, -1 for padding."""
    x = np.zeros((n, MAX_DOCS, N_FEATURES), dtype=np.float32)
    relevance = np.full((n, MAX_DOCS), -1, dtype=np.int64)
    for q in range(n):
        docs = rng.integers(8, MAX_DOCS + 1)
        level = rng.standard_normal(N_FEATURES) * 2
        scale = rng.uniform(0.5, 2.0)
        features = level + scale * rng.standard_normal((docs, N_FEATURES))
        inner = (features - level) / scale
        merit = inner @ weights + 1.5 * np.abs(inner[:, 0]) + 0.5 * rng.standard_normal(docs)
        place = merit.argsort().argsort() / docs
        x[q, :docs] = features
        relevance[q, :docs] = np.digitize(place, [0.5, 0.75, 0.9])
    return torch.from_numpy(x), torch.from_numpy(relevance)


def normalise(x, relevance):
    """Features are standardised within each query, over its real documents."""
    real = (relevance >= 0).unsqueeze(-1).float()
    n = real.sum(dim=1, keepdim=True)
    mean = (x * real).sum(dim=1, keepdim=True) / n
    var = ((x - mean) ** 2 * real).sum(dim=1, keepdim=True) / n
    return (x - mean) / (var + 1e-6).sqrt() * real


class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(N_FEATURES, 48), nn.ReLU(), nn.Dropout(0.1), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 1)
        )

    def forward(self, x):
        return self.net(x).squeeze(-1)


def ranknet_loss(scores, relevance):
    real = relevance >= 0
    better = relevance.unsqueeze(2) > relevance.unsqueeze(1)
    valid = better & real.unsqueeze(2) & real.unsqueeze(1)
    difference = scores.unsqueeze(2) - scores.unsqueeze(1)
    return F.softplus(-difference[valid]).mean()


def ndcg(scores, relevance, k=5):
    scores = scores.masked_fill(relevance < 0, float("-inf"))
    gain = 2.0 ** relevance.clamp(min=0) - 1
    discount = 1 / torch.log2(torch.arange(2, k + 2).float())
    order = scores.argsort(dim=1, descending=True)[:, :k]
    found = (gain.gather(1, order) * discount).sum(dim=1)
    ideal = (gain.sort(dim=1, descending=True).values[:, :k] * discount).sum(dim=1)
    return (found / ideal).mean().item()


x_train, r_train = queries(500)
x_test, r_test = queries(150)
x_train, x_test = normalise(x_train, r_train), normalise(x_test, r_test)

model = Scorer()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=15)
for epoch in range(15):
    model.train()
    total = 0.0
    for batch in torch.randperm(len(x_train)).split(25):
        loss = ranknet_loss(model(x_train[batch]), r_train[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    scheduler.step()
    if epoch % 3 == 2:
        print(f"epoch {epoch + 1}: loss {total / 20:.4f}")

model.eval()
with torch.no_grad():
    print(f"FINAL ndcg={ndcg(model(x_test), r_test):.4f}")
