# Matrix factorisation with BPR and negative sampling: "users" are documentation topics, "items" are the words in them.
import re
from collections import Counter, defaultdict
from pydoc_data.topics import topics

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim

SEED = 0
FACTORS = 16
EPOCHS = 4
BATCH_SIZE = 512
LR = 0.02
REG = 1e-3
TOPK = 20


def load_interactions(n_items=800):
    docs = {name: set(re.findall(r"[a-z_]{3,}", text.lower())) for name, text in topics.items()}
    popular = Counter(w for words in docs.values() for w in words)
    items = {w: i for i, (w, c) in enumerate(popular.most_common(n_items))}
    users = [name for name in sorted(docs) if len(docs[name] & set(items)) >= 40]
    rng = np.random.default_rng(11)
    train, test = defaultdict(set), defaultdict(set)
    for u, name in enumerate(users):
        seen = sorted(items[w] for w in docs[name] if w in items)
        held = set(rng.choice(seen, len(seen) // 5, replace=False).tolist())
        train[u], test[u] = set(seen) - held, held
    return len(users), len(items), train, test


class BPRMF(nn.Module):
    def __init__(self, n_users, n_items, factors):
        super().__init__()
        self.user_emb = nn.Embedding(n_users, factors)
        self.item_emb = nn.Embedding(n_items, factors)
        self.item_bias = nn.Embedding(n_items, 1)
        nn.init.normal_(self.user_emb.weight, std=0.1)
        nn.init.normal_(self.item_emb.weight, std=0.1)
        nn.init.zeros_(self.item_bias.weight)

    def forward(self, user, item):
        return (self.user_emb(user) * self.item_emb(item)).sum(-1) + self.item_bias(item).squeeze(-1)


def sample_epoch(train, n_items, rng):
    """Yields batches of (user, positive item, negative item)."""
    pairs = np.array([(u, i) for u in train for i in train[u]])
    rng.shuffle(pairs)
    for start in range(0, len(pairs), BATCH_SIZE):
        batch = pairs[start : start + BATCH_SIZE]
        neg = rng.integers(0, n_items, len(batch))
        for row in range(len(batch)):
            while neg[row] in train[batch[row, 0]]:
                neg[row] = rng.integers(0, n_items)
        yield torch.from_numpy(batch[:, 0]), torch.from_numpy(batch[:, 1]), torch.from_numpy(neg)


@torch.no_grad()
def recall_at_k(model, train, test, n_items, k):
    recalls = []
    for u in test:
        scores = model(torch.full((n_items,), u), torch.arange(n_items))
        scores[list(train[u])] = -float("inf")
        top = scores.topk(k).indices.tolist()
        recalls.append(len(set(top) & test[u]) / min(k, len(test[u])))
    return float(np.mean(recalls))


torch.manual_seed(SEED)
rng = np.random.default_rng(SEED)
n_users, n_items, train, test = load_interactions()
print(f"{n_users} users, {n_items} items, {sum(map(len, train.values()))} interactions")
model = BPRMF(n_users, n_items, FACTORS)
optimizer = optim.Adam(model.parameters(), lr=LR)

for epoch in range(EPOCHS):
    model.train()
    losses = []
    for user, pos, neg in sample_epoch(train, n_items, rng):
        pos_score, neg_score = model(user, pos), model(user, neg)
        loss = -F.logsigmoid(pos_score - neg_score).mean()
        reg = (
            model.user_emb(user).pow(2).sum(1) + model.item_emb(pos).pow(2).sum(1) + model.item_emb(neg).pow(2).sum(1)
        ).mean()
        loss = loss + REG * reg
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if epoch % 2 == 1:
        print(
            f"epoch {epoch + 1} loss {np.mean(losses):.4f} recall@{TOPK} {recall_at_k(model, train, test, n_items, TOPK):.4f}"
        )

print(f"FINAL recall={recall_at_k(model, train, test, n_items, TOPK):.4f}")
