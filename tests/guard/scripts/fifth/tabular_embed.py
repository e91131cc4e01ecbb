"""Tabular classification with entity embeddings on an imbalanced table.

The table is the Unicode character database that Python carries: predict which letters are uppercase (about one in ten).

    python tabular_embed.py --epochs 6 --lr 4e-3
"""

import argparse
import unicodedata

import numpy as np
import pandas as pd
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.metrics import average_precision_score, f1_score
from sklearn.model_selection import train_test_split
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler

CAT_COLS = ["script", "second_word", "block", "width"]
NUM_COLS = ["name_length", "n_words", "parity", "offset_in_block"]


def load_table():
    rows = []
    for cp in range(0x80, 0x11000):
        ch = chr(cp)
        if not unicodedata.category(ch).startswith("L") or 0x3400 <= cp < 0xA000 or 0xAC00 <= cp < 0xD7A4:
            continue
        words = unicodedata.name(ch, "NONE").split()
        second = words[1] if len(words) > 1 and words[1] in ("LETTER", "SYLLABLE", "SMALL", "CAPITAL") else "other"
        second = "LETTER" if second in ("SMALL", "CAPITAL") else second
        rows.append(
            (
                words[0],
                second,
                str(cp >> 7),
                unicodedata.east_asian_width(ch),
                sum(map(len, words)),
                len(words),
                cp % 2,
                cp % 128,
                int(unicodedata.category(ch) == "Lu"),
            )
        )
    return pd.DataFrame(rows, columns=CAT_COLS + NUM_COLS + ["target"])


class TableDataset(Dataset):
    def __init__(self, df):
        self.cats = torch.tensor(df[CAT_COLS].values.astype(np.int64))
        self.nums = torch.tensor(df[NUM_COLS].values.astype(np.float32))
        self.target = torch.tensor(df["target"].values.astype(np.float32))

    def __len__(self):
        return len(self.target)

    def __getitem__(self, idx):
        return self.cats[idx], self.nums[idx], self.target[idx]


class TabularNet(nn.Module):
    def __init__(self, cardinalities, n_num, hidden=64, p=0.1):
        super().__init__()
        self.embeds = nn.ModuleList([nn.Embedding(c + 1, min(16, (c + 2) // 2)) for c in cardinalities])
        n_emb = sum(e.embedding_dim for e in self.embeds)
        self.bn = nn.BatchNorm1d(n_num)
        self.layers = nn.Sequential(
            nn.Linear(n_emb + n_num, hidden),
            nn.ReLU(),
            nn.BatchNorm1d(hidden),
            nn.Dropout(p),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 1),
        )

    def forward(self, cats, nums):
        x = torch.cat([e(cats[:, i]) for i, e in enumerate(self.embeds)], dim=1)
        x = torch.cat([x, self.bn(nums)], dim=1)
        return self.layers(x).squeeze(1)


def evaluate(model, loader):
    model.eval()
    scores, targets = [], []
    with torch.no_grad():
        for cats, nums, y in loader:
            scores.append(torch.sigmoid(model(cats, nums)))
            targets.append(y)
    scores, targets = torch.cat(scores).numpy(), torch.cat(targets).numpy()
    return average_precision_score(targets, scores), f1_score(targets, scores > 0.5)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)

    df = load_table()
    train_df, test_df = train_test_split(df, test_size=0.3, stratify=df["target"], random_state=1)
    train_df, test_df = train_df.copy(), test_df.copy()
    cardinalities = []
    for col in CAT_COLS:
        codes = {v: i + 1 for i, v in enumerate(train_df[col].unique())}  # 0 is for unseen values
        train_df[col] = train_df[col].map(codes)
        test_df[col] = test_df[col].map(codes).fillna(0)
        cardinalities.append(len(codes))
    print(len(train_df), "rows,", "positives:", train_df["target"].mean().round(3), "cardinalities:", cardinalities)

    train_ds, test_ds = TableDataset(train_df), TableDataset(test_df)
    counts = np.bincount(train_df["target"])
    weights = (1.0 / counts)[train_df["target"].values]
    sampler = WeightedRandomSampler(torch.tensor(weights), num_samples=len(train_ds), replacement=True)
    train_loader = DataLoader(train_ds, batch_size=args.batch_size, sampler=sampler)
    test_loader = DataLoader(test_ds, batch_size=512)

    model = TabularNet(cardinalities, len(NUM_COLS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=1e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=args.lr, total_steps=args.epochs * len(train_loader)
    )
    for epoch in range(args.epochs):
        model.train()
        for cats, nums, y in train_loader:
            optimizer.zero_grad()
            loss = F.binary_cross_entropy_with_logits(model(cats, nums), y)
            loss.backward()
            optimizer.step()
            scheduler.step()
        ap, f1 = evaluate(model, test_loader)
        print(f"epoch {epoch}: loss {loss.item():.4f} AP {ap:.4f} F1 {f1:.4f}")
    print(f"FINAL f1={f1:.4f}")


if __name__ == "__main__":
    main()
