"""Does the second sentence follow from the first? Pairs in one sequence with separators and segment ids, a small BERT-like encoder."""

import random

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

PAD, CLS, SEP = 0, 1, 2
NAMES = "anna ben carla david emma felix".split()
PLACES = "kitchen garden office school".split()
LABELS = ["follows", "contradicts", "open"]
VOCAB = {
    w: i
    for i, w in enumerate(
        "<pad> <cls> <sep> is in the not and reads sleeps waits inside there".split() + NAMES + PLACES
    )
}


def make_pair(rng):
    who = rng.sample(NAMES, 2)
    where = rng.sample(PLACES, 3)
    premise = f"{who[0]} {rng.choice(['reads', 'sleeps', 'waits'])} in the {where[0]} and {who[1]} is in the {where[1]}"
    if rng.random() < 0.3:
        premise = f"{who[0]} is in the {where[0]}"
        who[1], where[1] = who[0], where[0]
    k = rng.randrange(2)
    label = rng.choices([0, 1, 2], [0.45, 0.35, 0.2])[0]
    if label == 0:
        second = f"{who[k]} is in the {where[k]}"
    elif label == 1:
        second = rng.choice([f"{who[k]} is not in the {where[k]}", f"{who[k]} is in the {where[2]}"])
    else:
        second = f"{rng.choice([n for n in NAMES if n not in who])} is in the {rng.choice(where)}"
    return premise, second, label


class Pairs(Dataset):
    def __init__(self, n, seed):
        rng = random.Random(seed)
        self.rows = [make_pair(rng) for _ in range(n)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        a, b, label = self.rows[i]
        a, b = [VOCAB[w] for w in a.split()], [VOCAB[w] for w in b.split()]
        ids = [CLS, *a, SEP, *b, SEP]
        return {"input_ids": ids, "token_type_ids": [0] * (len(a) + 2) + [1] * (len(b) + 1), "label": label}


def collate(rows):
    longest = max(len(r["input_ids"]) for r in rows)
    pad = lambda key: torch.tensor([r[key] + [0] * (longest - len(r[key])) for r in rows])  # noqa: E731
    ids = pad("input_ids")
    return {
        "input_ids": ids,
        "token_type_ids": pad("token_type_ids"),
        "attention_mask": (ids != PAD).long(),
        "labels": torch.tensor([r["label"] for r in rows]),
    }


class Encoder(nn.Module):
    def __init__(self, dim=64, heads=4, depth=2):
        super().__init__()
        self.tokens, self.positions, self.segments = (
            nn.Embedding(len(VOCAB), dim, padding_idx=PAD),
            nn.Embedding(40, dim),
            nn.Embedding(2, dim),
        )
        layer = nn.TransformerEncoderLayer(dim, heads, 2 * dim, dropout=0.0, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.pooler, self.classifier = nn.Linear(dim, dim), nn.Linear(dim, len(LABELS))

    def forward(self, input_ids, token_type_ids, attention_mask):
        position = torch.arange(input_ids.shape[1])
        h = self.tokens(input_ids) + self.positions(position) + self.segments(token_type_ids)
        h = self.encoder(h, src_key_padding_mask=attention_mask == 0)
        return self.classifier(torch.tanh(self.pooler(h[:, 0])))


def main():
    torch.manual_seed(0)
    train, val = Pairs(6000, 0), Pairs(600, 1)
    train_loader = DataLoader(train, batch_size=32, shuffle=True, collate_fn=collate)
    val_loader = DataLoader(val, batch_size=100, collate_fn=collate)
    model = Encoder()
    no_decay = [p for n, p in model.named_parameters() if p.ndim < 2]
    decay = [p for n, p in model.named_parameters() if p.ndim >= 2]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.01}, {"params": no_decay, "weight_decay": 0.0}], lr=1e-3
    )
    epochs = 6
    total = epochs * len(train_loader)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min((s + 1) / 100, max(0.0, (total - s) / (total - 100)))
    )
    for epoch in range(epochs):
        model.train()
        for batch in train_loader:
            labels = batch.pop("labels")
            loss = nn.functional.cross_entropy(model(**batch), labels)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        model.eval()
        right = 0
        with torch.no_grad():
            for batch in val_loader:
                labels = batch.pop("labels")
                right += (model(**batch).argmax(-1) == labels).sum().item()
        print(f"epoch {epoch}: loss {loss.item():.3f} accuracy {right / len(val):.4f}")
    print(f"FINAL accuracy={right / len(val):.4f}")


if __name__ == "__main__":
    main()
