"""Genres of films, several for each, from the words of their plots (synthetic): counts of words, an MLP, weighted binary cross-entropy."""

import numpy as np
import torch
from sklearn.metrics import f1_score
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainworthy

SEED = 0
GENRES = ["drama", "comedy", "crime", "horror", "romance", "war"]
N_WORDS = 300


def make_plots(n=2500):
    rng = np.random.default_rng(21)
    topics = rng.dirichlet(np.full(N_WORDS, 0.05), len(GENRES))
    common = rng.dirichlet(np.full(N_WORDS, 0.5))
    share = np.array([0.45, 0.3, 0.2, 0.12, 0.2, 0.08])
    tags = (rng.random((n, len(GENRES))) < share).astype(np.float32)
    tags[tags.sum(1) == 0, 0] = 1
    words = np.stack([
        rng.multinomial(rng.integers(40, 120), 0.65 * common + 0.35 * (t @ topics) / t.sum()) for t in tags
    ])  # fmt: skip
    return words, tags


def features(words):
    x = np.log1p(words)
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


words, tags = make_plots()
order = np.random.default_rng(0).permutation(len(tags))
train_rows, val_rows = order[:2000], order[2000:]
X, Y = torch.from_numpy(features(words)), torch.from_numpy(tags)
train_set, val_set = TensorDataset(X[train_rows], Y[train_rows]), TensorDataset(X[val_rows], Y[val_rows])
positive = Y[train_rows].mean(0)
criterion = nn.BCEWithLogitsLoss(pos_weight=((1 - positive) / positive).sqrt())


def make_model():
    return nn.Sequential(nn.Linear(N_WORDS, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, len(GENRES)))


def train_epoch(model, optimizer, loader):
    model.train()
    for x, y in loader:
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def macro_f1(model, loader):
    model.eval()
    predicted, wanted = [], []
    with torch.no_grad():
        for x, y in loader:
            predicted.append(torch.sigmoid(model(x)) > 0.5)
            wanted.append(y)
    return float(f1_score(torch.cat(wanted).numpy(), torch.cat(predicted).numpy(), average="macro", zero_division=0))


def make_script():
    model = make_model()
    return trainworthy.Script(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-3),
        train=train_set,
        val=val_set,
        batch_size=64,
        loss=lambda model, batch: criterion(model(batch[0]), batch[1]),
        metric=macro_f1,
        train_loop=train_epoch,
        floor=0.35,
    )


def main():
    torch.manual_seed(SEED)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-3)
    train_loader, val_loader = DataLoader(train_set, 64, shuffle=True), DataLoader(val_set, 256)
    for epoch in range(15):
        train_epoch(model, optimizer, train_loader)
        if epoch % 5 == 4:
            print(f"epoch {epoch + 1}: macro F1 {macro_f1(model, val_loader):.3f}")
    print(f"FINAL f1={macro_f1(model, val_loader):.4f}")


if __name__ == "__main__":
    main()
