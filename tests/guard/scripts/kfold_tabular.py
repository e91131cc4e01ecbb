"""House prices as on Kaggle: pandas, imputation, one-hot columns, log price, K-fold, mean of the folds on the test rows."""

import random

import numpy as np
import pandas as pd
import torch
from sklearn.metrics import r2_score
from sklearn.model_selection import KFold
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.utils.data import DataLoader, Dataset


class CFG:
    seed = 2021
    n_splits = 4
    epochs = 12
    batch_size = 32
    lr = 3e-3
    weight_decay = 1e-4


def seed_everything(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def read_csv(n, seed):
    rng = np.random.default_rng(seed)
    quarter = rng.choice(["center", "north", "river", "industrial", "hills"], n, p=[0.25, 0.3, 0.15, 0.2, 0.1])
    kind = rng.choice(["flat", "house", "loft"], n, p=[0.6, 0.3, 0.1])
    area = rng.gamma(8, 11, n) + 20
    rooms = np.clip((area / 25 + rng.normal(0, 0.8, n)).round(), 1, 9)
    year = rng.integers(1900, 2020, n).astype(float)
    distance = rng.exponential(4, n)
    factor = (
        pd.Series(quarter).map({"center": 1.5, "north": 1.0, "river": 1.35, "industrial": 0.7, "hills": 1.2}).to_numpy()
    )
    factor = factor * pd.Series(kind).map({"flat": 1.0, "house": 1.15, "loft": 1.3}).to_numpy()
    age = np.where(year < 1945, 1.1, 0.8 + 0.005 * (year - 1945))
    price = 2500 * area**0.9 * factor * age * np.exp(-0.04 * distance) * np.exp(rng.normal(0, 0.08, n))
    df = pd.DataFrame(
        {"Quarter": quarter, "Kind": kind, "Area": area, "Rooms": rooms, "Year": year, "Distance": distance}
    )
    for column in ("Rooms", "Year"):
        df.loc[rng.random(n) < 0.08, column] = np.nan
    df["SalePrice"] = price
    return df


class HouseDataset(Dataset):
    def __init__(self, x, y=None):
        self.x = np.asarray(x, dtype=np.float32)
        self.y = None if y is None else np.asarray(y, dtype=np.float32).reshape(-1, 1)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        if self.y is None:
            return torch.tensor(self.x[i])
        return torch.tensor(self.x[i]), torch.tensor(self.y[i])


class MLP(nn.Module):
    def __init__(self, num_features, hidden=96):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(num_features, hidden),
            nn.BatchNorm1d(hidden),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(hidden, hidden),
            nn.BatchNorm1d(hidden),
            nn.ReLU(),
            nn.Linear(hidden, 1),
        )

    def forward(self, x):
        return self.layers(x)


def train_fn(model, optimizer, scheduler, loss_fn, loader):
    model.train()
    final_loss = 0
    for x, y in loader:
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        final_loss += loss.item()
    return final_loss / len(loader)


def valid_fn(model, loss_fn, loader):
    model.eval()
    final_loss, preds = 0, []
    with torch.no_grad():
        for x, y in loader:
            out = model(x)
            final_loss += loss_fn(out, y).item()
            preds.append(out.numpy())
    return final_loss / len(loader), np.concatenate(preds)[:, 0]


def inference_fn(model, loader):
    model.eval()
    with torch.no_grad():
        return np.concatenate([model(x).numpy() for x in loader])[:, 0]


def preprocess(train, test):
    full = pd.concat([train.drop(columns="SalePrice"), test.drop(columns="SalePrice")], keys=["train", "test"])
    full = full.fillna(train.median(numeric_only=True))
    full["AreaPerRoom"] = full["Area"] / full["Rooms"]
    full = pd.get_dummies(full, columns=["Quarter", "Kind"], dtype=float)
    return full.loc["train"], full.loc["test"]


def main():
    seed_everything(CFG.seed)
    train, test = read_csv(2400, 1), read_csv(800, 2)
    x, x_test = preprocess(train, test)
    y = np.log1p(train["SalePrice"].to_numpy())
    mean, std = y.mean(), y.std()

    oof, prediction = np.zeros(len(train)), np.zeros(len(test))
    for fold, (trn_idx, val_idx) in enumerate(KFold(CFG.n_splits, shuffle=True, random_state=CFG.seed).split(x)):
        scaler = StandardScaler()
        x_trn = scaler.fit_transform(x.iloc[trn_idx])
        x_val = scaler.transform(x.iloc[val_idx])
        x_tst = scaler.transform(x_test)
        y_trn, y_val = (y[trn_idx] - mean) / std, (y[val_idx] - mean) / std

        trainloader = DataLoader(HouseDataset(x_trn, y_trn), batch_size=CFG.batch_size, shuffle=True, drop_last=True)
        validloader = DataLoader(HouseDataset(x_val, y_val), batch_size=256, shuffle=False)
        testloader = DataLoader(HouseDataset(x_tst), batch_size=256, shuffle=False)

        model = MLP(x.shape[1])
        optimizer = torch.optim.AdamW(model.parameters(), lr=CFG.lr, weight_decay=CFG.weight_decay)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=1e-2, epochs=CFG.epochs, steps_per_epoch=len(trainloader)
        )
        loss_fn = nn.MSELoss()
        best_loss = np.inf
        for epoch in range(CFG.epochs):
            train_loss = train_fn(model, optimizer, scheduler, loss_fn, trainloader)
            valid_loss, valid_pred = valid_fn(model, loss_fn, validloader)
            print(f"FOLD {fold} EPOCH {epoch} train_loss {train_loss:.4f} valid_loss {valid_loss:.4f}")
            if valid_loss < best_loss:
                best_loss = valid_loss
                oof[val_idx] = valid_pred
                torch.save(model.state_dict(), f"FOLD{fold}_.pth")
        model.load_state_dict(torch.load(f"FOLD{fold}_.pth"))
        prediction += inference_fn(model, testloader) / CFG.n_splits

    rmsle = np.sqrt(np.mean((oof * std + mean - y) ** 2))
    price = np.expm1(prediction * std + mean)
    print(f"CV RMSLE {rmsle:.4f}  test R2 {r2_score(test['SalePrice'], price):.4f}")


if __name__ == "__main__":
    main()
