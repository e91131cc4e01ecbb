"""Hand-written Lightning-like class: diabetes progression from ten features, scaled target, early stopping, best weights."""

import copy
from dataclasses import dataclass

import torch
from sklearn.datasets import load_diabetes
from sklearn.metrics import r2_score, root_mean_squared_error
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


@dataclass
class Config:
    lr: float = 2e-3
    batch_size: int = 32
    max_epochs: int = 80
    patience: int = 12
    seed: int = 7


class DataModule:
    def __init__(self, cfg):
        self.cfg = cfg

    def setup(self):
        X, y = load_diabetes(return_X_y=True, scaled=False)
        X_tr, X_te, y_tr, y_te = train_test_split(X, y, test_size=0.2, random_state=1)
        X_tr, X_va, y_tr, y_va = train_test_split(X_tr, y_tr, test_size=0.2, random_state=1)
        self.x_scaler = StandardScaler().fit(X_tr)
        self.y_scaler = StandardScaler().fit(y_tr[:, None])
        self.sets = {}
        for name, X_, y_ in (("train", X_tr, y_tr), ("val", X_va, y_va), ("test", X_te, y_te)):
            xs = torch.tensor(self.x_scaler.transform(X_), dtype=torch.float32)
            ys = torch.tensor(self.y_scaler.transform(y_[:, None]), dtype=torch.float32).squeeze(1)
            self.sets[name] = TensorDataset(xs, ys)

    def loader(self, name):
        return DataLoader(self.sets[name], self.cfg.batch_size if name == "train" else 256, shuffle=name == "train")


class Regressor(nn.Module):
    def __init__(self, cfg, y_scaler):
        super().__init__()
        self.cfg, self.y_scaler = cfg, y_scaler
        self.net = nn.Sequential(
            nn.Linear(10, 64),
            nn.LayerNorm(64),
            nn.SiLU(),
            nn.Dropout(0.2),
            nn.Linear(64, 64),
            nn.SiLU(),
            nn.Linear(64, 1),
        )

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch):
        x, y = batch
        pred = self(x).squeeze(-1)
        return ((pred - y) ** 2).mean()

    def validation_step(self, batch):
        x, y = batch
        return self(x).squeeze(-1), y

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.cfg.lr, weight_decay=1e-2)
        sched = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, mode="min", factor=0.3, patience=4)
        return opt, sched

    def to_units(self, t):
        return self.y_scaler.inverse_transform(t.numpy()[:, None])[:, 0]


class Trainer:
    def __init__(self, cfg):
        self.cfg = cfg

    def run_eval(self, model, loader):
        model.eval()
        with torch.no_grad():
            outs = [model.validation_step(b) for b in loader]
        pred, y = (torch.cat(t) for t in zip(*outs))
        return {
            "mse": float(((pred - y) ** 2).mean()),
            "rmse": root_mean_squared_error(model.to_units(y), model.to_units(pred)),
            "r2": r2_score(model.to_units(y), model.to_units(pred)),
        }

    def fit(self, model, dm):
        opt, sched = model.configure_optimizers()
        best, best_state, waited = float("inf"), None, 0
        for epoch in range(self.cfg.max_epochs):
            model.train()
            total = 0.0
            for batch in dm.loader("train"):
                opt.zero_grad()
                loss = model.training_step(batch)
                loss.backward()
                opt.step()
                total += loss.item() * len(batch[0])
            m = self.run_eval(model, dm.loader("val"))
            sched.step(m["mse"])
            print(
                f"epoch {epoch:02d} train {total / len(dm.sets['train']):.3f} val mse {m['mse']:.3f} rmse {m['rmse']:.1f} r2 {m['r2']:.3f} lr {opt.param_groups[0]['lr']:.1e}"
            )
            if m["mse"] < best:
                best, best_state, waited = m["mse"], copy.deepcopy(model.state_dict()), 0
            else:
                waited += 1
                if waited >= self.cfg.patience:
                    break
        model.load_state_dict(best_state)

    def test(self, model, dm):
        m = self.run_eval(model, dm.loader("test"))
        print(f"TEST rmse {m['rmse']:.1f} r2 {m['r2']:.3f}")


def main():
    cfg = Config()
    torch.manual_seed(cfg.seed)
    dm = DataModule(cfg)
    dm.setup()
    model = Regressor(cfg, dm.y_scaler)
    trainer = Trainer(cfg)
    trainer.fit(model, dm)
    trainer.test(model, dm)


if __name__ == "__main__":
    main()
