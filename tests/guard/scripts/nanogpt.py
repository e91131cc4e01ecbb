"""The shape of nanoGPT: memmap, get_batch, prefetch of the next batch, accumulation, estimate_loss, its own cosine, checkpoints."""

import argparse
import math
import os

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

out_dir, eval_interval, eval_iters, always_save_checkpoint = "out", 60, 10, True
gradient_accumulation_steps, batch_size, block_size, dropout = 2, 8, 32, 0.1
learning_rate, max_iters, warmup_iters, min_lr, grad_clip = 1e-3, 300, 20, 1e-4, 1.0

data_dir = "data"
if not os.path.exists(os.path.join(data_dir, "train.bin")):
    os.makedirs(data_dir, exist_ok=True)
    raw = np.frombuffer(open(argparse.__file__, "rb").read(), dtype=np.uint8).astype(np.uint16) % 128
    raw[:-10000].tofile(os.path.join(data_dir, "train.bin"))
    raw[-10000:].tofile(os.path.join(data_dir, "val.bin"))


def get_batch(split):
    data = np.memmap(os.path.join(data_dir, f"{split}.bin"), dtype=np.uint16, mode="r")
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy((data[i : i + block_size]).astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy((data[i + 1 : i + 1 + block_size]).astype(np.int64)) for i in ix])
    return x, y


class CausalSelfAttention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.c_attn, self.c_proj, self.dropout = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), dropout

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, 4, C // 4).transpose(1, 2) for t in self.c_attn(x).split(C, 2))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(dim), CausalSelfAttention(dim), nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim), nn.Dropout(dropout))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(128, dim), nn.Embedding(block_size, dim)
        self.h = nn.ModuleList([Block(dim) for _ in range(2)])
        self.ln_f, self.lm_head = nn.LayerNorm(dim), nn.Linear(dim, 128, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, 128), targets.view(-1), ignore_index=-1)


torch.manual_seed(1337)
model = GPT()
scaler = torch.amp.GradScaler("cuda", enabled=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
model = torch.compile(model)


@torch.no_grad()
def estimate_loss():
    out = {}
    model.eval()
    for split in ["train", "val"]:
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            X, Y = get_batch(split)
            logits, loss = model(X, Y)
            losses[k] = loss.item()
        out[split] = losses.mean()
    model.train()
    return out


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    coeff = 0.5 * (1.0 + math.cos(math.pi * (it - warmup_iters) / (max_iters - warmup_iters)))
    return min_lr + coeff * (learning_rate - min_lr)


X, Y = get_batch("train")
iter_num = 0
while True:
    for param_group in optimizer.param_groups:
        param_group["lr"] = get_lr(iter_num)
    if iter_num % eval_interval == 0:
        losses = estimate_loss()
        print(f"step {iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
        if iter_num > 0:
            os.makedirs(out_dir, exist_ok=True)
            checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": iter_num}
            torch.save(checkpoint, os.path.join(out_dir, "ckpt.pt"))
    for micro_step in range(gradient_accumulation_steps):
        logits, loss = model(X, Y)
        loss = loss / gradient_accumulation_steps
        X, Y = get_batch("train")
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    iter_num += 1
    if iter_num > max_iters:
        break
