"""
Regression on a table, from a notebook: pandas, StandardScaler, an embedding for each categorical column, early stopping, the best weights.
Predicts the area of the worst nucleus of a sample from the mean and error columns of the Wisconsin data.
"""

import argparse
import copy

import numpy as np
import pandas as pd
import torch
import torch.nn as nn
from sklearn.datasets import load_breast_cancer
from sklearn.metrics import r2_score
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch.utils.data import DataLoader, Dataset

TARGET = "worst area"
CATEGORICAL = ["diagnosis", "texture band"]


def load_frame():
    bunch = load_breast_cancer(as_frame=True)
    df = bunch.frame.rename(columns={"target": "diagnosis"})
    df["diagnosis"] = df["diagnosis"].map({0: "malignant", 1: "benign"})
    df["texture band"] = pd.qcut(df["mean texture"], 6, labels=[f"band {i}" for i in range(6)]).astype(str)
    keep = [c for c in df.columns if c.endswith("error") or c in CATEGORICAL or c == TARGET]
    keep += ["mean texture", "mean smoothness", "mean symmetry", "mean fractal dimension"]
    df = df[keep]
    # the error columns are heavy-tailed
    errors = [c for c in df.columns if c.endswith("error")]
    df[errors] = np.log(df[errors] + 1e-3)
    return df


class TabularDataset(Dataset):
    def __init__(self, x_num, x_cat, y):
        self.x_num = torch.tensor(x_num, dtype=torch.float32)
        self.x_cat = torch.tensor(x_cat, dtype=torch.long)
        self.y = torch.tensor(y, dtype=torch.float32)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, idx):
        return self.x_num[idx], self.x_cat[idx], self.y[idx]


class TabularModel(nn.Module):
    def __init__(self, embedding_sizes, n_cont, hidden=96, p=0.15):
        super().__init__()
        self.embeddings = nn.ModuleList([nn.Embedding(categories, size) for categories, size in embedding_sizes])
        n_emb = sum(e.embedding_dim for e in self.embeddings)
        self.layers = nn.Sequential(
            nn.Linear(n_emb + n_cont, hidden),
            nn.ReLU(),
            nn.BatchNorm1d(hidden),
            nn.Dropout(p),
            nn.Linear(hidden, hidden // 2),
            nn.ReLU(),
            nn.BatchNorm1d(hidden // 2),
            nn.Dropout(p),
            nn.Linear(hidden // 2, 1),
        )

    def forward(self, x_cont, x_cat):
        x = [e(x_cat[:, i]) for i, e in enumerate(self.embeddings)]
        x = torch.cat([*x, x_cont], dim=1)
        return self.layers(x).squeeze(1)


class EarlyStopping:
    def __init__(self, patience=12):
        self.patience, self.counter, self.best_loss, self.best_state = patience, 0, float("inf"), None

    def __call__(self, val_loss, model):
        if val_loss < self.best_loss:
            self.best_loss, self.counter = val_loss, 0
            self.best_state = copy.deepcopy(model.state_dict())
        else:
            self.counter += 1
        return self.counter >= self.patience


def train_one_epoch(model, loader, criterion, optimizer):
    model.train()
    running_loss = 0.0
    for x_num, x_cat, y in loader:
        optimizer.zero_grad()
        preds = model(x_num, x_cat)
        loss = criterion(preds, y)
        loss.backward()
        optimizer.step()
        running_loss += loss.item() * len(y)
    return running_loss / len(loader.dataset)


@torch.no_grad()
def evaluate(model, loader, criterion):
    model.eval()
    running_loss, predictions = 0.0, []
    for x_num, x_cat, y in loader:
        preds = model(x_num, x_cat)
        running_loss += criterion(preds, y).item() * len(y)
        predictions.append(preds.numpy())
    return running_loss / len(loader.dataset), np.concatenate(predictions)


def main(args):
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    df = load_frame()
    categories = {c: sorted(df[c].unique()) for c in CATEGORICAL}
    for c in CATEGORICAL:
        df[c] = pd.Categorical(df[c], categories=categories[c]).codes

    y = df[TARGET]
    X = df.drop(columns=[TARGET])
    X_train, X_test, y_train, y_test = train_test_split(X, y, test_size=0.25, random_state=1)
    X_train, X_val, y_train, y_val = train_test_split(X_train, y_train, test_size=0.2, random_state=1)

    numerical = [c for c in X.columns if c not in CATEGORICAL]
    scaler, target_scaler = StandardScaler(), StandardScaler()
    num_train = scaler.fit_transform(X_train[numerical])
    num_val = scaler.transform(X_val[numerical])
    num_test = scaler.transform(X_test[numerical])
    t_train = target_scaler.fit_transform(y_train.to_numpy().reshape(-1, 1)).ravel()
    t_val = target_scaler.transform(y_val.to_numpy().reshape(-1, 1)).ravel()
    t_test = target_scaler.transform(y_test.to_numpy().reshape(-1, 1)).ravel()

    train_ds = TabularDataset(num_train, X_train[CATEGORICAL].to_numpy(), t_train)
    val_ds = TabularDataset(num_val, X_val[CATEGORICAL].to_numpy(), t_val)
    test_ds = TabularDataset(num_test, X_test[CATEGORICAL].to_numpy(), t_test)
    train_loader = DataLoader(train_ds, batch_size=args.batch_size, shuffle=True, drop_last=True)
    val_loader = DataLoader(val_ds, batch_size=128, shuffle=False)
    test_loader = DataLoader(test_ds, batch_size=128, shuffle=False)

    embedding_sizes = [(len(categories[c]), min(50, (len(categories[c]) + 1) // 2)) for c in CATEGORICAL]
    model = TabularModel(embedding_sizes, len(numerical))
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="min", factor=0.5, patience=5)
    stopper = EarlyStopping(args.patience)
    for epoch in range(args.epochs):
        train_loss = train_one_epoch(model, train_loader, criterion, optimizer)
        val_loss, _ = evaluate(model, val_loader, criterion)
        scheduler.step(val_loss)
        if epoch % 10 == 0:
            print(f"Epoch {epoch:03d} | train loss {train_loss:.4f} | val loss {val_loss:.4f}")
        if stopper(val_loss, model):
            print(f"Early stopping at epoch {epoch}")
            break

    model.load_state_dict(stopper.best_state)
    _, preds = evaluate(model, test_loader, criterion)
    preds = target_scaler.inverse_transform(preds.reshape(-1, 1)).ravel()
    rmse = np.sqrt(np.mean((preds - y_test.to_numpy()) ** 2))
    print(f"Test RMSE {rmse:.1f}, R2 {r2_score(y_test, preds):.3f}")
    print(f"FINAL rmse={rmse:.1f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=150)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--patience", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
