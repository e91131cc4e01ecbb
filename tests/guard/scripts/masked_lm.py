"""Masked language modelling: a collator that masks 15%, targets -100 elsewhere, a tiny BERT written out."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

MASK, LENGTH = 128, 48
torch.manual_seed(0)


class Text(Dataset):
    def __init__(self, start, end):
        raw = torch.tensor(list(open(argparse.__file__, "rb").read()[start:end])) % 128
        self.rows = raw[: len(raw) // LENGTH * LENGTH].view(-1, LENGTH)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"input_ids": self.rows[i]}


def collate(rows):
    ids = torch.stack([r["input_ids"] for r in rows])
    chosen = torch.rand(ids.shape) < 0.15
    labels = ids.masked_fill(~chosen, -100)
    return {"input_ids": ids.masked_fill(chosen, MASK), "labels": labels}


class Bert(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.embed, self.pos = nn.Embedding(129, dim), nn.Embedding(LENGTH, dim)
        layer = nn.TransformerEncoderLayer(dim, 4, 96, 0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(dim, 128)

    def forward(self, input_ids, labels=None):
        x = self.encoder(self.embed(input_ids) + self.pos.weight)
        logits = self.head(x)
        loss = nn.functional.cross_entropy(logits.view(-1, 128), labels.view(-1)) if labels is not None else None
        return {"loss": loss, "logits": logits}


model = Bert()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
train_loader = DataLoader(Text(0, 60000), batch_size=32, shuffle=True, collate_fn=collate)
val_loader = DataLoader(Text(60000, 80000), batch_size=32, collate_fn=collate)
for epoch in range(5):
    model.train()
    for batch in train_loader:
        loss = model(**batch)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    losses = []
    for batch in val_loader:
        with torch.no_grad():
            losses.append(model(**batch)["loss"].item())
    print(f"epoch {epoch} val loss {sum(losses) / len(losses):.3f}")
