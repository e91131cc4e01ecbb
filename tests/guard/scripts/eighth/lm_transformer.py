"""A small transformer language model on sources of Python: causal mask, tied weights, AdamW, accumulation, warm-up and cosine."""

import email.message
import inspect
import logging
import math
import tarfile

import torch
import torch.nn as nn
import torch.nn.functional as F

SEED = 0
torch.manual_seed(SEED)

BATCH, BLOCK = 32, 32
ACCUM = 2
STEPS = 160
D_MODEL, HEADS, LAYERS = 64, 4, 2

text = "".join(inspect.getsource(m) for m in (tarfile, logging, email.message, inspect))
vocab = sorted(set(text))
stoi = {c: i for i, c in enumerate(vocab)}
data = torch.tensor([stoi[c] for c in text])
n = int(0.9 * len(data))
train_data, val_data = data[:n], data[n:]


def get_batch(split):
    source = train_data if split == "train" else val_data
    ix = torch.randint(len(source) - BLOCK - 1, (BATCH,))
    x = torch.stack([source[i : i + BLOCK] for i in ix])
    y = torch.stack([source[i + 1 : i + 1 + BLOCK] for i in ix])
    return x, y


class TransformerLM(nn.Module):
    def __init__(self, ntoken):
        super().__init__()
        self.tok = nn.Embedding(ntoken, D_MODEL)
        self.pos = nn.Embedding(BLOCK, D_MODEL)
        layer = nn.TransformerEncoderLayer(D_MODEL, HEADS, 4 * D_MODEL, dropout=0.1, norm_first=True, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(D_MODEL)
        self.head = nn.Linear(D_MODEL, ntoken, bias=False)
        nn.init.normal_(self.tok.weight, std=0.02)
        nn.init.normal_(self.pos.weight, std=0.02)
        self.head.weight = self.tok.weight

    def forward(self, x):
        T = x.size(1)
        h = self.tok(x) + self.pos(torch.arange(T))
        mask = nn.Transformer.generate_square_subsequent_mask(T)
        h = self.encoder(h, mask=mask)
        return self.head(self.norm(h))


model = TransformerLM(len(vocab))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)


def lr_at(step):
    if step < 50:
        return (step + 1) / 50
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (step - 50) / (STEPS - 50)))


scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_at)


@torch.no_grad()
def estimate_loss(batches=20):
    model.eval()
    losses = []
    for _ in range(batches):
        x, y = get_batch("val")
        logits = model(x)
        losses.append(F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1)).item())
    model.train()
    return sum(losses) / len(losses)


model.train()
for step in range(STEPS):
    total = 0.0
    for micro in range(ACCUM):
        x, y = get_batch("train")
        logits = model(x)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1)) / ACCUM
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    if (step + 1) % 50 == 0:
        print(f"step {step + 1}: train loss {total:.4f}, val loss {estimate_loss():.4f}")

print(f"FINAL loss={estimate_loss(80):.4f}")
