"""Which module of the standard library does a docstring's sentence come from? A Transformer encoder with padding masks."""

import _pydecimal
import argparse
import ast
import asyncio
import email
import inspect
import logging
import os
import random
import re
import socket
import statistics
import tarfile
import unittest
from collections import Counter

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

PAD, UNK = 0, 1
TOPICS = {
    "numbers": [_pydecimal, statistics],
    "code": [ast, inspect],
    "net": [socket, asyncio, email],
    "tests": [unittest, logging],
    "files": [os, tarfile],
}


def sentences():
    """(sentence, class), one for each paragraph of a docstring."""
    rows = []
    for label, modules in enumerate(TOPICS.values()):
        seen = set()
        for module in modules:
            names = [getattr(module, n, None) for n in sorted(dir(module))]
            members = [m for c in names if isinstance(c, type) for m in (getattr(c, n, None) for n in sorted(vars(c)))]
            for thing in [module, *names, *members]:
                doc = getattr(thing, "__doc__", None)
                if isinstance(doc, str) and getattr(thing, "__module__", module.__name__) != "builtins":
                    seen.update(p for p in re.split(r"\n\s*\n", doc) if len(p.split()) > 5)
        rows += [(s, label) for s in sorted(seen)[:400]]
    return rows


def tokenize(text):
    return re.findall(r"[a-z_]+|[^\sa-z]", text.lower())[:60]


class Sentences(Dataset):
    def __init__(self, rows, vocab):
        self.ids = [torch.tensor([vocab.get(t, UNK) for t in tokenize(s)]) for s, _ in rows]
        self.labels = [label for _, label in rows]

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return self.ids[i], self.labels[i]


def collate(batch):
    ids, labels = zip(*batch)
    ids = pad_sequence(ids, batch_first=True, padding_value=PAD)
    mask = (ids != PAD).long()
    return ids, mask, torch.tensor(labels)


class Classifier(nn.Module):
    def __init__(self, vocab_size, num_classes, dim=48):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, dim, padding_idx=PAD)
        self.position = nn.Embedding(64, dim)
        layer = nn.TransformerEncoderLayer(dim, nhead=4, dim_feedforward=96, dropout=0.2, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=1, enable_nested_tensor=False)
        self.head = nn.Linear(dim, num_classes)

    def forward(self, ids, mask):
        x = self.embed(ids) + self.position(torch.arange(ids.size(1), device=ids.device))
        x = self.encoder(x, src_key_padding_mask=mask == 0)
        mask = mask.unsqueeze(-1)
        pooled = (x * mask).sum(1) / mask.sum(1)
        return self.head(pooled)


def accuracy(model, loader):
    model.eval()
    with torch.no_grad():
        hits = sum((model(ids, mask).argmax(-1) == labels).sum().item() for ids, mask, labels in loader)
    model.train()
    return hits / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    random.seed(args.seed)
    torch.manual_seed(args.seed)

    rows = sentences()
    random.shuffle(rows)
    split = int(0.8 * len(rows))
    train_rows, test_rows = rows[:split], rows[split:]
    counts = Counter(t for s, _ in train_rows for t in tokenize(s))
    vocab = {t: i + 2 for i, (t, n) in enumerate(counts.most_common(3000)) if n > 1}
    train_set, test_set = Sentences(train_rows, vocab), Sentences(test_rows, vocab)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True, collate_fn=collate)
    test_loader = DataLoader(test_set, batch_size=64, collate_fn=collate)

    model = Classifier(len(vocab) + 2, len(TOPICS))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    for epoch in range(args.epochs):
        total = 0.0
        for ids, mask, labels in train_loader:
            loss = criterion(model(ids, mask), labels)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch}: loss {total / len(train_loader):.3f}, test accuracy {accuracy(model, test_loader):.3f}")
    print(f"FINAL test_acc={accuracy(model, test_loader):.4f}")


if __name__ == "__main__":
    main()
