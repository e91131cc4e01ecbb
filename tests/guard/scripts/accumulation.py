"""Gradient accumulation of 8 with bf16 autocast and a scaler, weights saved by the best score."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x, y = load_digits(return_X_y=True)
x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
train_loader = DataLoader(TensorDataset(x[:1400], y[:1400]), 8, shuffle=True)
val_loader = DataLoader(TensorDataset(x[1400:], y[1400:]), 128)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu")
k, best = 8, 0.0
for epoch in range(8):
    model.train()
    optimizer.zero_grad()
    for i, (a, b) in enumerate(train_loader):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(a), b) / k
        scaler.scale(loss).backward()
        if (i + 1) % k == 0 or i + 1 == len(train_loader):
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        acc = sum((model(a).argmax(1) == b).sum().item() for a, b in val_loader) / 397
    print(f"epoch {epoch} acc {acc:.3f}")
    if acc > best:
        best = acc
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "best.pt")
