"""Relapse-free survival from ten measurements (a Cox model with a small net): the partial likelihood of a batch, with censored rows.

The times are made from scikit-learn's diabetes data: a high progression is an early relapse; a third of the patients leaves the study early.
"""

import numpy as np
import torch
from sklearn.datasets import load_diabetes
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainworthy

SEED = 0
X, progression = load_diabetes(return_X_y=True)
rng = np.random.default_rng(2)
event_time = 400 - progression  # days
leaves = np.where(rng.random(len(X)) < 0.33, rng.uniform(40, 380, len(X)), np.inf)
time, event = np.minimum(event_time, leaves), event_time <= leaves
order = rng.permutation(len(X))
X = (X - X[order[:340]].mean(0)) / X[order[:340]].std(0)


def dataset(rows):
    return TensorDataset(
        torch.tensor(X[rows], dtype=torch.float32),
        torch.tensor(time[rows], dtype=torch.float32),
        torch.tensor(event[rows], dtype=torch.float32),
    )


train_set, val_set = dataset(order[:340]), dataset(order[340:])


def make_model():
    return nn.Sequential(nn.Linear(10, 32), nn.SELU(), nn.AlphaDropout(0.2), nn.Linear(32, 1, bias=False))


def cox_loss(risk, time, event):
    """Negative partial log-likelihood (Breslow); the risk set of a patient: who is still in the study at that time."""
    order = torch.argsort(time, descending=True)
    risk, event = risk[order], event[order]
    log_set = torch.logcumsumexp(risk, 0)
    return -((risk - log_set) * event).sum() / event.sum().clamp(min=1)


def train_epoch(model, optimizer, loader):
    model.train()
    for x, t, e in loader:
        loss = cox_loss(model(x).squeeze(1), t, e)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def concordance(model, loader):
    model.eval()
    risk, t, e = (torch.cat(parts) for parts in zip(*((model(x).squeeze(1), t, e) for x, t, e in loader)))
    comparable = (t[:, None] < t[None, :]) & (e[:, None] == 1)
    right = (risk[:, None] > risk[None, :]) & comparable
    return right.sum().item() / comparable.sum().item()


def make_optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-3)


def make_script():
    model = make_model()
    return trainworthy.Script(
        model=model,
        optimizer=make_optimizer(model),
        train=train_set,
        val=val_set,
        batch_size=68,
        target="1",
        loss=lambda model, batch: cox_loss(model(batch[0]).squeeze(1), batch[1], batch[2]),
        metric=concordance,
        floor=0.5,
        train_loop=train_epoch,
        batch_dependence="the risk set of a patient is made of the batch",
    )


def main():
    torch.manual_seed(SEED)
    model = make_model()
    optimizer = make_optimizer(model)
    train_loader, val_loader = DataLoader(train_set, 68, shuffle=True), DataLoader(val_set, 102)
    for epoch in range(30):
        train_epoch(model, optimizer, train_loader)
    print(f"FINAL concordance={concordance(model, val_loader):.4f}")


if __name__ == "__main__":
    main()
