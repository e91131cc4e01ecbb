"""A small GPT on characters of Python's standard library; validation on modules that are not in training. Warm-up, cosine, clipping."""

import argparse  # noqa: E401
import calendar
import configparser
import csv
import difflib
import inspect
import math
import shlex
import textwrap

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import trainworthy

SEED = 0
BLOCK, BATCH, EPOCHS = 48, 32, 4

train_text = "".join(inspect.getsource(m) for m in (argparse, calendar, configparser, difflib, shlex))
val_text = "".join(inspect.getsource(m) for m in (csv, textwrap))
chars = sorted(set(train_text))
stoi = {c: i for i, c in enumerate(chars)}


class Blocks(Dataset):
    def __init__(self, text):
        self.ids = torch.tensor([stoi[c] for c in text if c in stoi])

    def __len__(self):
        return (len(self.ids) - 1) // BLOCK

    def __getitem__(self, i):
        chunk = self.ids[i * BLOCK : (i + 1) * BLOCK + 1]
        return chunk[:-1], chunk[1:]


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.heads = heads

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, vocab, dim=64, depth=2, heads=4):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, dim), nn.Embedding(BLOCK, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)
        self.apply(self.init)
        self.head.weight = self.tok.weight

    def init(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)

    def forward(self, ids, targets=None):
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        loss = None if targets is None else F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1))
        return logits, loss


train_set, val_set = Blocks(train_text), Blocks(val_text)


def make_parts():
    model = GPT(len(chars))
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=3e-3, betas=(0.9, 0.95)
    )
    total, warmup = EPOCHS * math.ceil(len(train_set) / BATCH), 20
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda s: min((s + 1) / warmup, 0.1 + 0.45 * (1 + math.cos(math.pi * min(s / total, 1.0)))),
    )

    def train_epoch(model, optimizer, loader):
        model.train()
        for x, y in loader:
            _, loss = model(x, y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()

    return model, optimizer, train_epoch


@torch.no_grad()
def bits_per_char(model, loader):
    model.eval()
    nats = [model(x, y)[1].item() * y.numel() for x, y in loader]
    return sum(nats) / (len(loader.dataset) * BLOCK) / math.log(2)


def make_script():
    model, optimizer, train_epoch = make_parts()
    return trainworthy.Script(
        model=model,
        optimizer=optimizer,
        train=train_set,
        val=val_set,
        batch_size=BATCH,
        classes=len(chars),
        loss=lambda model, batch: model(*batch)[1],
        metric=bits_per_char,
        higher_is_better=False,
        floor=math.log2(len(chars)),
        initial_loss=math.log(len(chars)),
        train_loop=train_epoch,
    )


def main():
    torch.manual_seed(SEED)
    model, optimizer, train_epoch = make_parts()
    train_loader, val_loader = DataLoader(train_set, BATCH, shuffle=True), DataLoader(val_set, 128)
    for epoch in range(EPOCHS):
        train_epoch(model, optimizer, train_loader)
        print(epoch + 1, bits_per_char(model, val_loader))
    print(f"FINAL bits={bits_per_char(model, val_loader):.4f}")


if __name__ == "__main__":
    main()
