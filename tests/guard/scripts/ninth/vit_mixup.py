"""A vision transformer from scratch on sklearn's digits, with mixup and a warm-up."""

import argparse
import math

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--epochs", type=int, default=12)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--lr", type=float, default=2e-3)
parser.add_argument("--alpha", type=float, default=0.2)
args = parser.parse_args()
torch.manual_seed(args.seed)
np.random.seed(args.seed)


class Attention(nn.Module):
    def __init__(self, dim, heads=4):
        super().__init__()
        self.heads = heads
        self.scale = (dim // heads) ** -0.5
        self.qkv = nn.Linear(dim, dim * 3, bias=False)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        attn = (q @ k.transpose(-2, -1)) * self.scale
        attn = attn.softmax(dim=-1)
        x = (attn @ v).transpose(1, 2).reshape(B, N, C)
        return self.proj(x)


class Block(nn.Module):
    def __init__(self, dim, mlp_dim):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim), Attention(dim)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, mlp_dim), nn.GELU(), nn.Linear(mlp_dim, dim))

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, image_size=8, patch=2, dim=64, depth=2, num_classes=10):
        super().__init__()
        n_patches = (image_size // patch) ** 2
        self.patch_embed = nn.Conv2d(1, dim, kernel_size=patch, stride=patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.randn(1, n_patches + 1, dim) * 0.02)
        self.blocks = nn.Sequential(*[Block(dim, dim * 2) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_classes)

    def forward(self, img):
        x = self.patch_embed(img).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1)
        x = x + self.pos_embed
        x = self.blocks(x)
        return self.head(self.norm(x)[:, 0])


digits = load_digits()
X = torch.tensor(digits.images / 8.0 - 1.0, dtype=torch.float32).unsqueeze(1)
y = torch.tensor(digits.target)
train_idx, test_idx = train_test_split(np.arange(len(X)), test_size=0.3, random_state=args.seed)
train_loader = DataLoader(
    TensorDataset(X[train_idx], y[train_idx]), batch_size=args.batch_size, shuffle=True, drop_last=True
)
test_loader = DataLoader(TensorDataset(X[test_idx], y[test_idx]), batch_size=256)

model = ViT()
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)
total_steps = args.epochs * len(train_loader)
warmup_steps = total_steps // 10


def lr_lambda(step):
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step - warmup_steps) / (total_steps - warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * progress))


scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_lambda)
criterion = nn.CrossEntropyLoss()


def mixup_data(x, y, alpha):
    lam = np.random.beta(alpha, alpha)
    index = torch.randperm(x.size(0))
    mixed_x = lam * x + (1 - lam) * x[index]
    return mixed_x, y, y[index], lam


@torch.no_grad()
def evaluate():
    model.eval()
    correct = sum((model(x).argmax(1) == t).sum().item() for x, t in test_loader)
    return correct / len(test_idx)


for epoch in range(args.epochs):
    model.train()
    losses = []
    for images, labels in train_loader:
        images, y_a, y_b, lam = mixup_data(images, labels, args.alpha)
        logits = model(images)
        loss = lam * criterion(logits, y_a) + (1 - lam) * criterion(logits, y_b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    acc = evaluate()
    print(f"epoch {epoch + 1:2d}  loss {np.mean(losses):.3f}  acc {acc:.4f}  lr {scheduler.get_last_lr()[0]:.5f}")

print(f"FINAL acc={acc:.4f}")
