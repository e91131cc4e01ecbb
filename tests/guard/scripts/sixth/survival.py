"""DeepSurv after czifan/DeepSurv.pytorch and pycox: Cox partial likelihood over risk sets of a batch, censoring, concordance."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SEED = 0
np.random.seed(SEED)
torch.manual_seed(SEED)
config = {"epochs": 20, "batch_size": 64, "lr": 3e-3, "l2": 1e-3, "drop": 0.2, "lr_decay_rate": 1e-3}


class SurvivalDataset(Dataset):
    def __init__(self, is_train):
        rng = np.random.default_rng(10 if is_train else 11)
        n = 1280 if is_train else 400
        self.X = rng.normal(size=(n, 8)).astype(np.float32)
        risk = 1.2 * self.X[:, 0] - 0.8 * self.X[:, 1] + 0.7 * self.X[:, 2] * self.X[:, 3]
        life, cut = rng.exponential(np.exp(-risk)), rng.exponential(2.0, n)
        self.y = np.minimum(life, cut).astype(np.float32)[:, None]
        self.e = (life <= cut).astype(np.float32)[:, None]

    def __getitem__(self, item):
        return torch.from_numpy(self.X[item]), torch.from_numpy(self.y[item]), torch.from_numpy(self.e[item])

    def __len__(self):
        return len(self.X)


class DeepSurv(nn.Module):
    def __init__(self):
        super().__init__()
        dims, layers = [8, 32, 32], []
        for i in range(len(dims) - 1):
            layers += [nn.Dropout(config["drop"])] if i > 0 else []
            layers += [nn.Linear(dims[i], dims[i + 1]), nn.BatchNorm1d(dims[i + 1]), nn.ReLU()]
        self.model = nn.Sequential(*layers, nn.Linear(dims[-1], 1))

    def forward(self, X):
        return self.model(X)


class NegativeLogLikelihood(nn.Module):
    def forward(self, risk_pred, y, e, model):
        mask = torch.ones(y.shape[0], y.shape[0])
        mask[(y.T - y) > 0] = 0
        log_loss = torch.exp(risk_pred) * mask
        log_loss = torch.sum(log_loss, dim=0) / torch.sum(mask, dim=0)
        log_loss = torch.log(log_loss).reshape(-1, 1)
        neg_log_loss = -torch.sum((risk_pred - log_loss) * e) / torch.sum(e)
        l2_loss = sum(torch.norm(w, p=2) for n, w in model.named_parameters() if "weight" in n)
        return neg_log_loss + config["l2"] * l2_loss


def c_index(risk_pred, y, e):
    y, e, risk = y.numpy().ravel(), e.numpy().ravel(), risk_pred.detach().numpy().ravel()
    earlier = (y[:, None] < y[None, :]) & (e[:, None] == 1)
    return float(
        (earlier * ((risk[:, None] > risk[None, :]) + 0.5 * (risk[:, None] == risk[None, :]))).sum() / earlier.sum()
    )


model = DeepSurv()
criterion = NegativeLogLikelihood()
optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
train_loader = DataLoader(SurvivalDataset(True), batch_size=config["batch_size"], shuffle=True)
test_set = SurvivalDataset(False)
test_loader = DataLoader(test_set, batch_size=len(test_set))
best_c_index = 0
for epoch in range(1, config["epochs"] + 1):
    for group in optimizer.param_groups:
        group["lr"] = config["lr"] / (1 + epoch * config["lr_decay_rate"])
    model.train()
    for X, y, e in train_loader:
        risk_pred = model(X)
        train_loss = criterion(risk_pred, y, e, model)
        optimizer.zero_grad()
        train_loss.backward()
        optimizer.step()
    model.eval()
    for X, y, e in test_loader:
        with torch.no_grad():
            risk_pred = model(X)
            valid_loss = criterion(risk_pred, y, e, model)
            valid_c = c_index(risk_pred, y, e)
    if best_c_index < valid_c:
        best_c_index = valid_c
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, "survival.pth")
    print(f"Epoch: {epoch} loss: {train_loss.item():.4f}({valid_loss.item():.4f}) c-index: {valid_c:.4f}")
print(f"FINAL c_index={valid_c:.4f}")
