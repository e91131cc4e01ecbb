# Regression on a table: how irregular does the largest cell look (worst symmetry), from the means and errors of all cells?
# 4-fold cross-validation, z-scores, early stopping, ReduceLROnPlateau. The interface is scikit-learn's.
import copy

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer
from sklearn.metrics import r2_score
from sklearn.model_selection import KFold, train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SEED = 0


def load():
    ds = load_breast_cancer()
    target = list(ds.feature_names).index("worst symmetry")
    return ds.data[:, :20].astype(np.float32), ds.data[:, target].astype(np.float32)


class Scaler:
    """Z-scores of columns."""

    def fit(self, a):
        self.mean, self.std = a.mean(axis=0), a.std(axis=0) + 1e-8
        return self

    def transform(self, a):
        return (a - self.mean) / self.std

    def inverse(self, a):
        return a * self.std + self.mean


class Net(nn.Module):
    def __init__(self, n_in, width=64):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(n_in, width), nn.LayerNorm(width), nn.GELU(), nn.Dropout(0.1), nn.Linear(width, width), nn.GELU()
        )
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        return self.out(self.body(x)).squeeze(-1)


def criterion(pred, y):
    return nn.functional.smooth_l1_loss(pred, y, beta=1.0)


def run_epoch(net, opt, loader):
    net.train()
    for x, y in loader:
        loss = criterion(net(x), y)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()


def val_r2(net, loader):
    """R2 does not depend on the target's scale."""
    net.eval()
    with torch.no_grad():
        pred = torch.cat([net(x) for x, _ in loader])
    truth = torch.cat([y for _, y in loader])
    return 1 - ((pred - truth) ** 2).sum().item() / ((truth - truth.mean()) ** 2).sum().item()


def as_dataset(X, y):
    return TensorDataset(torch.as_tensor(X, dtype=torch.float32), torch.as_tensor(y, dtype=torch.float32))


def new_optimizer(net):
    return torch.optim.Adam(net.parameters(), lr=3e-3, weight_decay=1e-4)


class TorchRegressor:
    def __init__(self, epochs=60, batch_size=32, patience=12):
        self.epochs, self.batch_size, self.patience = epochs, batch_size, patience

    def prepare(self, X, y):
        self.x_scaler, self.y_scaler = Scaler().fit(X), Scaler().fit(y)
        return self.x_scaler.transform(X), self.y_scaler.transform(y)

    def fit(self, X, y, net=None):
        X, y = self.prepare(X, y)
        X_tr, X_va, y_tr, y_va = train_test_split(X, y, test_size=0.2, random_state=SEED)
        loader = DataLoader(as_dataset(X_tr, y_tr), self.batch_size, shuffle=True)
        x_va, y_va = as_dataset(X_va, y_va).tensors
        self.net = net or Net(X.shape[1])
        opt = new_optimizer(self.net)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, mode="min", factor=0.5, patience=4)
        best, best_state, waited = float("inf"), None, 0
        for epoch in range(self.epochs):
            run_epoch(self.net, opt, loader)
            self.net.eval()
            with torch.no_grad():
                val_loss = criterion(self.net(x_va), y_va).item()
            plateau.step(val_loss)
            if val_loss < best:
                best, best_state, waited = val_loss, copy.deepcopy(self.net.state_dict()), 0
            else:
                waited += 1
                if waited > self.patience:
                    break
        self.net.load_state_dict(best_state)
        print(f"  stopped after {epoch + 1} epochs, val loss {best:.4f}")
        return self

    @torch.no_grad()
    def predict(self, X):
        self.net.eval()
        z = self.net(torch.as_tensor(self.x_scaler.transform(X), dtype=torch.float32))
        return self.y_scaler.inverse(z.numpy())


def make_script():
    import trainworthy

    X, y = load()
    X, y = TorchRegressor().prepare(X, y)
    X_tr, X_va, y_tr, y_va = train_test_split(X, y, test_size=0.25, random_state=SEED)
    net = Net(X.shape[1])
    return trainworthy.Script(
        model=net,
        optimizer=new_optimizer(net),
        train=as_dataset(X_tr, y_tr),
        val=as_dataset(X_va, y_va),
        loss=lambda model, batch: criterion(model(batch[0]), batch[1]),
        metric=val_r2,
        train_loop=run_epoch,
        floor=0.0,
        ceiling=1.0,
    )


def main():
    torch.manual_seed(SEED)
    X, y = load()
    scores = []
    for fold, (tr, te) in enumerate(KFold(4, shuffle=True, random_state=SEED).split(X)):
        reg = TorchRegressor().fit(X[tr], y[tr])
        scores.append(r2_score(y[te], reg.predict(X[te])))
        print(f"fold {fold}: R2 {scores[-1]:.4f}")
    print(f"FINAL r2={np.mean(scores):.4f}")


if __name__ == "__main__":
    main()
