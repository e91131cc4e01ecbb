"""A small character-level GPT on Python's documentation, with gradient accumulation and a cosine schedule by hand."""

import argparse
import math
from pydoc_data.topics import topics

import torch
import torch.nn as nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--block-size", type=int, default=32)
parser.add_argument("--batch-size", type=int, default=8, help="micro-batch")
parser.add_argument("--grad-accum", type=int, default=4)
parser.add_argument("--max-iters", type=int, default=100)
parser.add_argument("--warmup-iters", type=int, default=20)
parser.add_argument("--learning-rate", type=float, default=4e-3)
parser.add_argument("--min-lr", type=float, default=2e-4)
parser.add_argument("--grad-clip", type=float, default=1.0)
parser.add_argument("--n-embd", type=int, default=48)
parser.add_argument("--n-layer", type=int, default=2)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

torch.manual_seed(args.seed)
text = "\n".join(topics[k] for k in sorted(topics) if k[0] in "abcdefst")
text = "".join(c if c.isascii() else "?" for c in text)
chars = sorted(set(text))
stoi = {c: i for i, c in enumerate(chars)}
data = torch.tensor([stoi[c] for c in text], dtype=torch.long)
n = int(0.9 * len(data))
train_data, val_data = data[:n], data[n:]


def get_batch(split):
    d = train_data if split == "train" else val_data
    ix = torch.randint(len(d) - args.block_size - 1, (args.batch_size,))
    x = torch.stack([d[i : i + args.block_size] for i in ix])
    y = torch.stack([d[i + 1 : i + 1 + args.block_size] for i in ix])
    return x, y


class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd, n_head=4):
        super().__init__()
        self.n_head = n_head
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.register_buffer("mask", torch.tril(torch.ones(args.block_size, args.block_size)).bool())

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (z.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for z in (q, k, v))
        att = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        att = att.masked_fill(~self.mask[:T, :T], float("-inf"))
        att = F.softmax(att, dim=-1)
        return self.c_proj((att @ v).transpose(1, 2).contiguous().view(B, T, C))


class Block(nn.Module):
    def __init__(self, n_embd):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.attn = CausalSelfAttention(n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocab_size, n_embd, n_layer):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(args.block_size, n_embd)
        self.blocks = nn.ModuleList([Block(n_embd) for _ in range(n_layer)])
        self.ln_f, self.lm_head = nn.LayerNorm(n_embd), nn.Linear(n_embd, vocab_size, bias=False)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def get_lr(it):
    if it < args.warmup_iters:
        return args.learning_rate * (it + 1) / args.warmup_iters
    decay_ratio = (it - args.warmup_iters) / (args.max_iters - args.warmup_iters)
    coeff = 0.5 * (1.0 + math.cos(math.pi * decay_ratio))
    return args.min_lr + coeff * (args.learning_rate - args.min_lr)


@torch.no_grad()
def estimate_loss(iters=10):
    model.eval()
    losses = torch.tensor([model(*get_batch("val"))[1].item() for _ in range(iters)])
    model.train()
    return losses.mean().item()


model = GPT(len(chars), args.n_embd, args.n_layer)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)

for it in range(args.max_iters):
    lr = get_lr(it)
    for group in optimizer.param_groups:
        group["lr"] = lr
    for micro_step in range(args.grad_accum):
        xb, yb = get_batch("train")
        _, loss = model(xb, yb)
        (loss / args.grad_accum).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if it % 40 == 0 or it == args.max_iters - 1:
        print(f"iter {it}: train loss {loss.item():.4f} val loss {estimate_loss():.4f} lr {lr:.2e}")
print(f"FINAL val_loss={estimate_loss(60):.4f}")
