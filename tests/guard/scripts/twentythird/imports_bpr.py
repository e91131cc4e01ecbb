"""A recommender (BPR matrix factorisation): which names does a Python file import? A file is a user, an imported name is an item.

Implicit feedback from the sources of installed packages; all tensors are made once, and one held-out name a file is ranked.
"""

import collections
import os
import pathlib
import re

import numpy as np
import scipy
import sklearn
import torch
import transformers
from torch import nn
from torch.nn import functional as F

SEED = int(os.environ.get("SEED", "0"))
DIM, LR, REG, EPOCHS, BATCH = 32, 5e-3, 2e-3, 20, 512


def imported_names(path):
    text = path.read_text(encoding="utf-8")
    names = set(re.findall(r"^import ([\w.]+)", text, re.MULTILINE))
    for group in re.findall(r"^from [\w.]+ import (?:\(([^)]*)\)|(.*))", text, re.MULTILINE):
        names.update(re.findall(r"\b[A-Za-z_]\w+", re.sub(r"#.*", "", "".join(group))))
    return sorted(names)


def read_interactions():
    """Pairs (user, item): items that occur in at least eight files, users with at least five items."""
    paths = [
        path for package in (sklearn, scipy) for path in sorted(pathlib.Path(package.__file__).parent.rglob("*.py"))
    ]
    paths += sorted((pathlib.Path(transformers.__file__).parent / "models").rglob("configuration_*.py"))
    paths += sorted((pathlib.Path(transformers.__file__).parent / "models").rglob("image_processing_*.py"))
    baskets = [imported_names(path) for path in paths]
    counts = collections.Counter(name for basket in baskets for name in basket)
    baskets = [[name for name in basket if counts[name] >= 8] for basket in baskets]
    baskets = [basket for basket in baskets if len(basket) >= 5]
    items = {name: i for i, name in enumerate(sorted({name for basket in baskets for name in basket}))}
    return [[items[name] for name in basket] for basket in baskets], len(items)


def split(baskets):
    """Leave one out: a random item of each user is the test item."""
    rng = np.random.RandomState(7)
    train, test = [], []
    for user, basket in enumerate(baskets):
        held = rng.randint(len(basket))
        test.append(basket[held])
        train += [(user, item) for k, item in enumerate(basket) if k != held]
    return torch.tensor(train), torch.tensor(test)


class MF(nn.Module):
    def __init__(self, users, items):
        super().__init__()
        self.user = nn.Embedding(users, DIM)
        self.item = nn.Embedding(items, DIM)
        self.bias = nn.Embedding(items, 1)
        nn.init.normal_(self.user.weight, std=0.1)
        nn.init.normal_(self.item.weight, std=0.1)
        nn.init.zeros_(self.bias.weight)

    def forward(self, user, item):
        return (self.user(user) * self.item(item)).sum(-1) + self.bias(item).squeeze(-1)

    def all_scores(self, user):
        return self.user(user) @ self.item.weight.T + self.bias.weight.squeeze(-1)


def sample_negatives(users, seen):
    """One item for each row that the user has not; drawn again while it has it."""
    items = torch.randint(seen.shape[1], users.shape)
    while (bad := seen[users, items]).any():
        items[bad] = torch.randint(seen.shape[1], (int(bad.sum()),))
    return items


@torch.no_grad()
def ndcg_at(model, test, seen, k=10):
    users = torch.arange(len(test))
    scores = model.all_scores(users).masked_fill(seen, -torch.inf)
    target = scores.gather(1, test[:, None])
    rank = (scores > target).sum(1)
    return torch.where(rank < k, 1 / torch.log2(rank + 2.0), 0.0).mean().item()


def main():
    torch.manual_seed(SEED)
    baskets, items = read_interactions()
    train, test = split(baskets)
    seen = torch.zeros(len(baskets), items, dtype=torch.bool)
    seen[train[:, 0], train[:, 1]] = True
    print(f"{len(baskets)} users, {items} items, {len(train)} interactions")
    model = MF(len(baskets), items)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    for epoch in range(EPOCHS):
        total = 0.0
        order = torch.randperm(len(train))
        for rows in order.split(BATCH):
            user, positive = train[rows].unbind(1)
            negative = sample_negatives(user, seen)
            loss = -F.logsigmoid(model(user, positive) - model(user, negative)).mean()
            norms = model.user(user).pow(2) + model.item(positive).pow(2) + model.item(negative).pow(2)
            loss = loss + REG * norms.sum(-1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(rows)
        if epoch % 5 == 4:
            print(f"epoch {epoch} loss {total / len(train):.4f} ndcg {ndcg_at(model, test, seen):.4f}")
    print(f"ndcg@10 {ndcg_at(model, test, seen):.4f}")


if __name__ == "__main__":
    main()
