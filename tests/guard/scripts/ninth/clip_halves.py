"""CLIP's loss on two views of one thing: the upper and the lower half of a handwritten digit must find each other."""

import argparse

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset


def parse_args():
    p = argparse.ArgumentParser(description="contrastive pre-training of two encoders")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--epochs", type=int, default=25)
    p.add_argument("--batch_size", type=int, default=64)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--dim", type=int, default=32)
    return p.parse_args()


class HalvesDataset(Dataset):
    def __init__(self, images, train):
        self.images, self.train = images, train

    def __len__(self):
        return len(self.images)

    def __getitem__(self, idx):
        image = self.images[idx]
        upper, lower = image[:4], image[4:]
        if self.train:
            upper = upper + 0.1 * torch.randn_like(upper)
            lower = lower + 0.1 * torch.randn_like(lower)
        return upper.flatten(), lower.flatten()


class Encoder(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(32, 192), nn.BatchNorm1d(192), nn.ReLU(), nn.Linear(192, 192), nn.ReLU(), nn.Linear(192, dim)
        )

    def forward(self, x):
        return self.net(x)


class CLIP(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.encode_upper = Encoder(dim)
        self.encode_lower = Encoder(dim)
        self.logit_scale = nn.Parameter(torch.ones([]) * np.log(1 / 0.07))

    def forward(self, upper, lower):
        u = F.normalize(self.encode_upper(upper), dim=-1)
        v = F.normalize(self.encode_lower(lower), dim=-1)
        logits = self.logit_scale.exp() * u @ v.t()
        return logits, logits.t()


def clip_loss(logits_per_upper, logits_per_lower):
    labels = torch.arange(len(logits_per_upper))
    return (F.cross_entropy(logits_per_upper, labels) + F.cross_entropy(logits_per_lower, labels)) / 2


@torch.no_grad()
def retrieval(model, loader):
    """Mean reciprocal rank of the right half among a batch of 100."""
    model.eval()
    ranks = []
    for upper, lower in loader:
        logits, _ = model(upper, lower)
        own = logits.diag().unsqueeze(1)
        ranks.append((logits >= own).sum(dim=1))
    return (1 / torch.cat(ranks).float()).mean().item()


def main():
    args = parse_args()
    torch.manual_seed(args.seed)
    images = torch.tensor(load_digits().images / 16.0, dtype=torch.float32)
    images = images[torch.randperm(len(images))]
    train_set, test_set = HalvesDataset(images[:1397], train=True), HalvesDataset(images[1397:], train=False)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True, drop_last=True)
    test_loader = DataLoader(test_set, batch_size=100)

    model = CLIP(args.dim)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=args.lr, epochs=args.epochs, steps_per_epoch=len(train_loader)
    )
    for epoch in range(args.epochs):
        model.train()
        total = 0.0
        for upper, lower in train_loader:
            optimizer.zero_grad()
            loss = clip_loss(*model(upper, lower))
            loss.backward()
            optimizer.step()
            scheduler.step()
            total += loss.item()
        mrr = retrieval(model, test_loader)
        if (epoch + 1) % 5 == 0:
            print(
                f"epoch {epoch + 1} loss {total / len(train_loader):.4f} mrr {mrr:.4f} scale {model.logit_scale.exp():.2f}"
            )
    print(f"FINAL mrr={mrr:.4f}")


if __name__ == "__main__":
    main()
