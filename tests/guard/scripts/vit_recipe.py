"""ViT on digits with a modern recipe: mixup, label smoothing, EMA, warm-up + cosine per step, bf16 autocast, accumulation."""

import argparse
import copy
import math
import random

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=12)
    p.add_argument("--warmup-epochs", type=int, default=2)
    p.add_argument("--batch-size", type=int, default=32)
    p.add_argument("--accum", type=int, default=2)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--weight-decay", type=float, default=0.05)
    p.add_argument("--mixup", type=float, default=0.2)
    p.add_argument("--smoothing", type=float, default=0.1)
    p.add_argument("--ema-decay", type=float, default=0.97)
    p.add_argument("--clip-grad", type=float, default=1.0)
    p.add_argument("--seed", type=int, default=0)
    return p.parse_args()


class Attention(nn.Module):
    def __init__(self, dim, heads=4):
        super().__init__()
        self.heads, self.scale = heads, (dim // heads) ** -0.5
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attn = (q @ k.transpose(-2, -1)) * self.scale
        attn = attn.softmax(dim=-1)
        x = (attn @ v).transpose(1, 2).reshape(B, N, C)
        return self.proj(x)


class Block(nn.Module):
    def __init__(self, dim, drop=0.1):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = Attention(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Dropout(drop), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, patch=2, dim=48, depth=3, classes=10):
        super().__init__()
        self.patch_embed = nn.Conv2d(1, dim, patch, patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, 17, dim))
        self.blocks = nn.Sequential(*[Block(dim) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


class ModelEma:
    def __init__(self, model, decay):
        self.module = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for e, m in zip(self.module.state_dict().values(), model.state_dict().values()):
            e.copy_(self.decay * e + (1.0 - self.decay) * m)


def mixup(x, y, alpha, smoothing, classes=10):
    lam = np.random.beta(alpha, alpha)
    off = smoothing / classes
    target = torch.full((len(y), classes), off).scatter_(1, y[:, None], 1 - smoothing + off)
    x = lam * x + (1 - lam) * x.flip(0)
    return x, lam * target + (1 - lam) * target.flip(0)


def soft_target_ce(logits, target):
    return torch.sum(-target * F.log_softmax(logits, dim=-1), dim=-1).mean()


def param_groups(model, wd):
    no = [p for n, p in model.named_parameters() if p.ndim == 1 or "pos" in n or "cls" in n]
    yes = [p for n, p in model.named_parameters() if not (p.ndim == 1 or "pos" in n or "cls" in n)]
    return [{"params": yes, "weight_decay": wd}, {"params": no, "weight_decay": 0.0}]


@torch.no_grad()
def validate(model, loader):
    was = model.training
    model.eval()
    right = n = 0
    for x, y in loader:
        right += (model(x).argmax(1) == y).sum().item()
        n += len(y)
    model.train(was)
    return right / n


def main(args):
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    d = load_digits()
    x = torch.tensor(d.images, dtype=torch.float32)[:, None] / 8 - 1
    y = torch.tensor(d.target)
    train_loader = DataLoader(TensorDataset(x[:1400], y[:1400]), args.batch_size, shuffle=True, drop_last=True)
    val_loader = DataLoader(TensorDataset(x[1400:], y[1400:]), 200)
    model = ViT()
    ema = ModelEma(model, args.ema_decay)
    optimizer = torch.optim.AdamW(param_groups(model, args.weight_decay), lr=args.lr)
    updates = len(train_loader) // args.accum
    total, warm = args.epochs * updates, args.warmup_epochs * updates

    def rate(step):
        if step < warm:
            return (step + 1) / warm
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warm) / (total - warm))))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    for epoch in range(args.epochs):
        model.train()
        optimizer.zero_grad(set_to_none=True)
        shown = 0.0
        for i, (images, labels) in enumerate(train_loader):
            if i >= updates * args.accum:
                break
            images, target = mixup(images, labels, args.mixup, args.smoothing)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(images)
            loss = soft_target_ce(logits.float(), target)
            (loss / args.accum).backward()
            shown += loss.item()
            if (i + 1) % args.accum == 0:
                nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                scheduler.step()
                ema.update(model)
        print(
            f"epoch {epoch} lr {scheduler.get_last_lr()[0]:.5f} loss {shown / (i + 1):.3f} "
            f"val {validate(model, val_loader):.3f} ema {validate(ema.module, val_loader):.3f}",
            flush=True,
        )
        torch.save({"model": model.state_dict(), "ema": ema.module.state_dict(), "epoch": epoch}, "last.pth")


if __name__ == "__main__":
    main(get_args())
