"""A character GRU on Python's own documentation strings: input and output embedding are tied, OneCycleLR per batch, bits per character."""

import argparse
import email.message
import math
import pydoc
import random as random_module
import textwrap

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--lr", type=float, default=6e-3)
parser.add_argument("--bptt", type=int, default=64)
parser.add_argument("--batch-size", type=int, default=32)


def corpus():
    parts = []
    for module in (random_module, textwrap, argparse, email.message, pydoc):
        for name, thing in sorted(vars(module).items()):
            parts.append(f"{name}: {getattr(thing, '__doc__', None) or ''}\n")
            if isinstance(thing, type):
                parts += [f"{k}: {v.__doc__}\n" for k, v in sorted(vars(thing).items()) if getattr(v, "__doc__", None)]
    seen, kept = set(), []
    for part in parts:
        if part.partition(":")[2] not in seen:
            seen.add(part.partition(":")[2])
            kept.append(part)
    text = "".join(kept)
    return "".join(c if c.isascii() else "?" for c in text)


class Chunks(Dataset):
    def __init__(self, ids, length):
        self.ids, self.length = ids, length

    def __len__(self):
        return (len(self.ids) - 1) // self.length

    def __getitem__(self, i):
        piece = self.ids[i * self.length : (i + 1) * self.length + 1]
        return piece[:-1], piece[1:]


class TiedGRU(nn.Module):
    def __init__(self, vocab, dim=96, hidden=160):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.gru = nn.GRU(dim, hidden, batch_first=True)
        self.project = nn.Linear(hidden, dim)
        self.out = nn.Linear(dim, vocab)
        nn.init.normal_(self.embed.weight, std=dim**-0.5)
        self.out.weight = self.embed.weight
        self.drop = nn.Dropout(0.1)

    def forward(self, ids):
        h, _ = self.gru(self.drop(self.embed(ids)))
        return self.out(self.drop(self.project(h)))


@torch.no_grad()
def bits(model, loader):
    model.eval()
    total = count = 0
    for x, y in loader:
        total += F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum").item()
        count += y.numel()
    model.train()
    return total / count / math.log(2)


def main():
    args = parser.parse_args()
    torch.manual_seed(1234)
    text = corpus()
    chars = sorted(set(text))
    ids = torch.tensor([chars.index(c) for c in text])
    cut = int(len(ids) * 0.9)
    train = DataLoader(Chunks(ids[:cut], args.bptt), args.batch_size, shuffle=True, drop_last=True)
    valid = DataLoader(Chunks(ids[cut:], args.bptt), args.batch_size)
    model = TiedGRU(len(chars))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=args.lr, epochs=args.epochs, steps_per_epoch=len(train), pct_start=0.2
    )
    step = 0
    for epoch in range(args.epochs):
        for x, y in train:
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            step += 1
            if step % 50 == 0:
                print(f"step {step} loss {loss.item():.3f} lr {scheduler.get_last_lr()[0]:.2e}")
        print(f"epoch {epoch}: {bits(model, valid):.3f} bits per character")
    print(f"FINAL bpc={bits(model, valid):.4f}")


if __name__ == "__main__":
    main()
