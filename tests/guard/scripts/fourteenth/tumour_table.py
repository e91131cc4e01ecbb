"""Rare tumours in a table: embeddings for the binned columns, a weighted cross-entropy, balanced accuracy on held-out rows."""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split
from torch.utils.data import DataLoader, Dataset

CATEGORICAL = ["mean radius", "mean concavity", "worst area"]
NUMERIC = ["mean texture", "mean smoothness", "mean symmetry", "mean fractal dimension", "texture error"]


def read_rows(seed):
    """A table of numbers, three columns of bins as strings, and 1 for a malignant tumour (one row in five)."""
    raw = load_breast_cancer()
    names = list(raw.feature_names)
    malignant = (raw.target == 0).astype(int)
    rng = np.random.default_rng(seed)
    rare = rng.choice(np.flatnonzero(malignant == 1), 90, replace=False)
    keep = rng.permutation(np.concatenate([np.flatnonzero(malignant == 0), rare]))
    table = raw.data[keep]
    numbers = table[:, [names.index(n) for n in NUMERIC]]
    codes = []
    for name in CATEGORICAL:
        column = table[:, names.index(name)]
        edges = np.quantile(column, np.linspace(0, 1, 13)[1:-1])
        codes.append([f"{name[-4:]}-{b}" for b in np.digitize(column, edges)])
    return numbers, list(zip(*codes)), malignant[keep]


def build_vocabularies(codes):
    vocabularies = []
    for column in zip(*codes):
        vocabulary = {}
        for code in column:
            vocabulary.setdefault(code, len(vocabulary) + 1)  # 0 is an unknown code
        vocabularies.append(vocabulary)
    return vocabularies


class TumourDataset(Dataset):
    def __init__(self, numbers, codes, labels, mean, std, vocabularies):
        self.numbers = torch.tensor((numbers - mean) / std, dtype=torch.float32)
        self.codes = torch.tensor([[v.get(c, 0) for v, c in zip(vocabularies, row)] for row in codes])
        self.labels = torch.tensor(labels)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.numbers[index], self.codes[index], self.labels[index]


class TabularNet(nn.Module):
    def __init__(self, n_numbers, cardinalities, dim=6, hidden=64):
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(c + 1, dim) for c in cardinalities)
        self.norm = nn.BatchNorm1d(n_numbers)
        self.layers = nn.Sequential(
            nn.Linear(n_numbers + dim * len(cardinalities), hidden),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(hidden, 2),
        )

    def forward(self, numbers, codes):
        embedded = [e(codes[:, i]) for i, e in enumerate(self.embeddings)]
        return self.layers(torch.cat([self.norm(numbers), *embedded], dim=1))


def train(model, loader, optimizer, weight):
    model.train()
    total = 0.0
    for numbers, codes, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(numbers, codes), labels, weight=weight)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(labels)
    return total / len(loader.dataset)


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    hits, counts = torch.zeros(2), torch.zeros(2)
    for numbers, codes, labels in loader:
        predicted = model(numbers, codes).argmax(dim=1)
        for c in range(2):
            hits[c] += ((predicted == c) & (labels == c)).sum()
            counts[c] += (labels == c).sum()
    return (hits / counts).mean().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=150)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)

    numbers, codes, labels = read_rows(args.seed)
    rows = np.arange(len(labels))
    train_rows, val_rows = train_test_split(rows, test_size=0.4, stratify=labels, random_state=args.seed)
    mean, std = numbers[train_rows].mean(axis=0), numbers[train_rows].std(axis=0)
    train_codes, val_codes = [codes[i] for i in train_rows], [codes[i] for i in val_rows]
    vocabularies = build_vocabularies(train_codes)
    train_set = TumourDataset(numbers[train_rows], train_codes, labels[train_rows], mean, std, vocabularies)
    val_set = TumourDataset(numbers[val_rows], val_codes, labels[val_rows], mean, std, vocabularies)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True, drop_last=True)
    val_loader = DataLoader(val_set, batch_size=128)

    model = TabularNet(len(NUMERIC), [len(v) for v in vocabularies])
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=1e-2)
    counts = torch.bincount(train_set.labels).float()
    weight = counts.sum() / (2 * counts)

    best, path = 0.0, Path(tempfile.gettempdir()) / "tumour_table.pt"
    for epoch in range(args.epochs):
        loss = train(model, train_loader, optimizer, weight)
        score = evaluate(model, val_loader)
        if score > best:
            best = score
            torch.save({"model": model.state_dict(), "vocabularies": vocabularies, "epoch": epoch}, path)
        print(f"epoch {epoch + 1:3d}  loss {loss:.4f}  balanced accuracy {score:.4f}")
    print(f"FINAL balanced_accuracy={score:.4f}")


if __name__ == "__main__":
    main()
