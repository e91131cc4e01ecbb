"""TransE after jimmywangheng/knowledge_representation_pytorch: corrupted triples, margin ranking, mean rank of the true tail."""

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils import data

SEED = 0
np.random.seed(SEED)
torch.manual_seed(SEED)
ENTITIES, RELATIONS = 120, 6


def knowledge(seed=3):
    rng = np.random.default_rng(seed)
    place, move = rng.normal(size=(ENTITIES, 6)), rng.normal(size=(RELATIONS, 6))
    gaps = ((place[:, None, None] + move[None, :, None] - place[None, None]) ** 2).sum(-1)
    triples = [
        (h, r, t) for h in range(ENTITIES) for r in range(RELATIONS) for t in np.argsort(gaps[h, r])[:3] if t != h
    ]
    rng.shuffle(triples)
    return np.array(triples)


class Triples(data.Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        head, relation, tail = self.rows[index]
        return int(head), int(relation), int(tail)


class TransE(nn.Module):
    def __init__(self, entity_count, relation_count, dim=16, norm=1, margin=1.0):
        super().__init__()
        self.norm, self.dim = norm, dim
        bound = 6 / np.sqrt(dim)
        self.entities_emb, self.relations_emb = nn.Embedding(entity_count, dim), nn.Embedding(relation_count, dim)
        nn.init.uniform_(self.entities_emb.weight, -bound, bound)
        nn.init.uniform_(self.relations_emb.weight, -bound, bound)
        self.criterion = nn.MarginRankingLoss(margin=margin, reduction="none")

    def forward(self, positive_triplets, negative_triplets):
        self.entities_emb.weight.data = F.normalize(self.entities_emb.weight.data, p=2, dim=1)
        positive_distances = self._distance(positive_triplets)
        negative_distances = self._distance(negative_triplets)
        return self.loss(positive_distances, negative_distances), positive_distances, negative_distances

    def predict(self, triplets):
        return self._distance(triplets)

    def loss(self, positive_distances, negative_distances):
        target = torch.tensor([-1], dtype=torch.long)
        return self.criterion(positive_distances, negative_distances, target)

    def _distance(self, triplets):
        heads, relations, tails = triplets[:, 0], triplets[:, 1], triplets[:, 2]
        return (self.entities_emb(heads) + self.relations_emb(relations) - self.entities_emb(tails)).norm(
            p=self.norm, dim=1
        )


def mean_rank(model, loader):
    ranks = []
    with torch.no_grad():
        for heads, relations, tails in loader:
            all_tails = torch.arange(ENTITIES).repeat(len(heads), 1)
            triplets = torch.stack(
                (heads[:, None].expand_as(all_tails), relations[:, None].expand_as(all_tails), all_tails), 2
            )
            distances = model.predict(triplets.reshape(-1, 3)).view(len(heads), -1)
            ranks.append((distances < distances.gather(1, tails[:, None])).sum(1) + 1)
    return torch.cat(ranks).float().mean().item()


rows = knowledge()
train_generator = data.DataLoader(Triples(rows[:-300]), batch_size=64, shuffle=True)
validation_generator = data.DataLoader(Triples(rows[-300:]), batch_size=100)
model = TransE(ENTITIES, RELATIONS)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for epoch in range(30):
    model.train()
    total = 0.0
    for heads, relations, tails in train_generator:
        positive_triples = torch.stack((heads, relations, tails), dim=1)
        head_or_tail = torch.randint(high=2, size=heads.size())
        random_entities = torch.randint(high=ENTITIES, size=heads.size())
        broken_heads = torch.where(head_or_tail == 1, random_entities, heads)
        broken_tails = torch.where(head_or_tail == 0, random_entities, tails)
        negative_triples = torch.stack((broken_heads, relations, broken_tails), dim=1)
        optimizer.zero_grad()
        loss, pd, nd = model(positive_triples, negative_triples)
        loss.mean().backward()
        optimizer.step()
        total += loss.mean().item()
    model.eval()
    if epoch % 5 == 4:
        print(
            f"epoch {epoch} loss {total / len(train_generator):.3f} mean rank {mean_rank(model, validation_generator):.2f}"
        )
print(f"FINAL mean_rank={mean_rank(model, validation_generator):.3f}")
