"""Digits with a fifth of the labels drawn at random: bfloat16 autocast, accumulation with a last partial group, averaged weights, warm-up."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

ACCUMULATE, EPOCHS = 4, 12


def generalised_cross_entropy(logits, target, q=0.5):
    p = F.softmax(logits.float(), dim=1).gather(1, target[:, None]).clamp(min=1e-6)
    return ((1 - p**q) / q).mean()


def build():
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 192), nn.BatchNorm1d(192), nn.ReLU(), nn.Dropout(0.2),
        nn.Linear(192, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Linear(96, 10),
    )  # fmt: skip


@torch.no_grad()
def accuracy(model, loader):
    model.eval()
    right = 0
    for x, y in loader:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            right += (model(x).argmax(1) == y).sum().item()
    return right / len(loader.dataset)


def main():
    torch.manual_seed(0)
    data = load_digits()
    x, y = torch.tensor(data.images, dtype=torch.float32) / 16, torch.tensor(data.target)
    order = torch.randperm(len(x))
    train_idx, val_idx = order[:1420], order[1420:]
    noisy = y[train_idx].clone()
    flip = torch.rand(len(noisy)) < 0.2
    noisy[flip] = torch.randint(0, 10, (int(flip.sum()),))
    train_loader = DataLoader(TensorDataset(x[train_idx], noisy), batch_size=20, shuffle=True)
    val_loader = DataLoader(TensorDataset(x[val_idx], y[val_idx]), batch_size=128)
    model = build()
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.98), use_buffers=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.02)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=18)
    steps = EPOCHS * -(-len(train_loader) // ACCUMULATE)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps - 18)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [18])

    for epoch in range(EPOCHS):
        model.train()
        optimizer.zero_grad()
        full = len(train_loader) // ACCUMULATE * ACCUMULATE
        for i, (a, b) in enumerate(train_loader):
            group = ACCUMULATE if i < full else len(train_loader) - full
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(a)
            loss = generalised_cross_entropy(logits, b)
            (loss / group).backward()
            if (i + 1) % ACCUMULATE == 0 or i + 1 == len(train_loader):
                nn.utils.clip_grad_norm_(model.parameters(), 2.0)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                ema.update_parameters(model)
        print(
            f"epoch {epoch} loss {loss.item():.3f} accuracy {accuracy(model, val_loader):.4f} averaged {accuracy(ema, val_loader):.4f}"
        )
    print(f"FINAL accuracy={accuracy(ema, val_loader):.4f}")


if __name__ == "__main__":
    main()
