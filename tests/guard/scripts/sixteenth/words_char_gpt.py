"""A tiny GPT on the text of the Python standard library's docstrings; it is tested on how well it completes held-out text."""

import argparse as text_a
import collections as text_b
import logging as text_c
import math
import optparse as text_d

import torch
import torch.nn as nn
import torch.nn.functional as F

SEED = 0
torch.manual_seed(SEED)

text = "".join(open(module.__file__).read() for module in (text_a, text_b, text_c, text_d))
text = " ".join("".join(c for c in text.lower() if c.isascii()).split())
chars = sorted(set(text))
stoi = {c: i for i, c in enumerate(chars)}
data = torch.tensor([stoi[c] for c in text])
split = int(0.9 * len(data))
train_data, val_data = data[:split], data[split:]

block_size, batch_size, n_embd, n_head = 32, 32, 48, 4
max_iters, warmup, learning_rate = 400, 30, 3e-3


def get_batch(source):
    ix = torch.randint(len(source) - block_size - 1, (batch_size,))
    return torch.stack([source[i : i + block_size + 1] for i in ix])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.qkv, self.proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))
        self.register_buffer("mask", torch.tril(torch.ones(block_size, block_size)).bool())

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, n_head, C // n_head).transpose(1, 2) for t in self.qkv(self.ln1(x)).chunk(3, dim=-1))
        att = q @ k.transpose(-2, -1) / math.sqrt(C // n_head)
        att = att.masked_fill(~self.mask[:T, :T], float("-inf"))
        att = F.softmax(att, dim=-1)
        y = (att @ v).transpose(1, 2).contiguous().view(B, T, C)
        x = x + self.proj(y)
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(len(chars), n_embd), nn.Embedding(block_size, n_embd)
        self.blocks = nn.Sequential(Block(), Block())
        self.ln_f, self.head = nn.LayerNorm(n_embd), nn.Linear(n_embd, len(chars))

    def forward(self, idx, labels=None):
        x = self.tok(idx) + self.pos(torch.arange(idx.shape[1]))
        logits = self.head(self.ln_f(self.blocks(x)))
        if labels is None:
            return logits, None
        shift_logits, shift_labels = logits[:, :-1], labels[:, 1:]
        return logits, F.cross_entropy(shift_logits.reshape(-1, len(chars)), shift_labels.reshape(-1))


model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
step_count = 0
for it in range(max_iters):
    if step_count <= warmup:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * step_count / warmup
    batch = get_batch(train_data)
    _, loss = model(batch[:, :block_size], labels=batch[:, :block_size])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step_count += 1
    if it % 100 == 0:
        print(it, round(loss.item(), 3))

model.eval()
with torch.no_grad():
    hits = []
    for _ in range(30):
        batch = get_batch(val_data)
        logits, _ = model(batch[:, :block_size])
        hits.append((logits[:, -1].argmax(-1) == batch[:, block_size]).float().mean())
print(f"FINAL next_char={torch.stack(hits).mean():.4f}")
