"""Malignant or not, from 30 measurements of cell nuclei: one logit, pos_weight, OneCycleLR stepped after every batch."""

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer
from sklearn.metrics import f1_score
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.utils.data import DataLoader, Dataset

import trainworthy

SEED = 0
EPOCHS, BATCH = 20, 32


class Nuclei(Dataset):
    def __init__(self, rows, scaler):
        data = load_breast_cancer()
        self.x = scaler.transform(data.data[rows]).astype(np.float32)
        self.y = (data.target[rows] == 0).astype(np.float32)  # 1: malignant

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


order = np.random.RandomState(4).permutation(len(load_breast_cancer().target))
train_rows, val_rows = order[:400], order[400:]
scaler = StandardScaler().fit(load_breast_cancer().data[train_rows])
train_set, val_set = Nuclei(train_rows, scaler), Nuclei(val_rows, scaler)
train_loader = DataLoader(train_set, batch_size=BATCH, shuffle=True)
val_loader = DataLoader(val_set, batch_size=128)
pos_weight = torch.tensor((train_set.y == 0).sum() / (train_set.y == 1).sum())
criterion = nn.BCEWithLogitsLoss(pos_weight=pos_weight)


def make_model():
    return nn.Sequential(nn.Linear(30, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 1))


def make_optimizer(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=1e-2, epochs=EPOCHS, steps_per_epoch=len(train_loader)
    )
    return optimizer, scheduler


def train_one_epoch(model, optimizer, scheduler, loader):
    model.train()
    for x, y in loader:
        logits = model(x).squeeze(1)
        loss = criterion(logits, y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        scheduler.step()


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    probs, truth = [], []
    for x, y in loader:
        probs.append(torch.sigmoid(model(x).squeeze(1)))
        truth.append(y)
    return float(f1_score(torch.cat(truth).numpy() > 0.5, torch.cat(probs).numpy() > 0.5))


def make_script():
    model = make_model()
    optimizer, scheduler = make_optimizer(model)
    return trainworthy.Script(
        model=model,
        optimizer=optimizer,
        train=train_loader,
        val=val_loader,
        classes=2,
        loss=lambda model, batch: criterion(model(batch[0]).squeeze(1), batch[1]),
        metric=evaluate,
        train_loop=lambda model, optimizer, batches: train_one_epoch(model, optimizer, scheduler, batches),
    )


def main():
    torch.manual_seed(SEED)
    model = make_model()
    optimizer, scheduler = make_optimizer(model)
    for epoch in range(EPOCHS):
        train_one_epoch(model, optimizer, scheduler, train_loader)
    print(f"FINAL f1={evaluate(model, val_loader):.4f}")


if __name__ == "__main__":
    main()
