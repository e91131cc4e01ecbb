"""Learning to rank after allegro/allRank: lists of documents padded to one length, ListNet's loss, NDCG@5, best weights kept."""

import copy

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SEED = 0
torch.manual_seed(SEED)
np.random.seed(SEED)
PADDED_Y_VALUE = -1
SLATE_LENGTH = 20
N_FEATURES = 16


class LibSVMDataset(Dataset):
    """Queries with 6 to 20 documents, graded 0 to 4 within their query."""

    def __init__(self, n_queries, seed):
        rng = np.random.default_rng(seed)
        w = np.random.default_rng(77).normal(size=N_FEATURES)
        self.X, self.y = [], []
        for _ in range(n_queries):
            n = rng.integers(6, SLATE_LENGTH + 1)
            docs = rng.normal(size=(n, N_FEATURES)) + rng.normal(size=N_FEATURES)
            score = docs @ w + 1.5 * docs[:, 0] * docs[:, 1] + 2 * np.abs(docs[:, 2]) + rng.normal(size=n)
            order = score.argsort().argsort() / n
            self.X.append(docs)
            self.y.append(np.digitize(order, [0.5, 0.7, 0.85, 0.95]))

    def __len__(self):
        return len(self.X)

    def __getitem__(self, idx):
        x, y = self.X[idx], self.y[idx]
        pad = SLATE_LENGTH - len(y)
        x = np.pad(x, ((0, pad), (0, 0)), "constant", constant_values=0)
        y = np.pad(y, (0, pad), "constant", constant_values=PADDED_Y_VALUE)
        return torch.from_numpy(x).float(), torch.from_numpy(y).float()


class FCModel(nn.Module):
    def __init__(self, sizes, dropout):
        super().__init__()
        self.input_norm = nn.LayerNorm(N_FEATURES)
        sizes = [N_FEATURES, *sizes]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes[:-1], sizes[1:]))
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(sizes[-1], 1)

    def forward(self, x):
        x = x + 0.1 * self.input_norm(x)
        for layer in self.layers:
            x = self.dropout(torch.relu(layer(x)))
        return self.output(x).squeeze(-1)


def listNet(y_pred, y_true, eps=1e-10):
    y_pred, y_true = y_pred.clone(), y_true.clone()
    mask = y_true == PADDED_Y_VALUE
    y_pred[mask] = float("-inf")
    y_true[mask] = float("-inf")
    preds_smax = torch.softmax(y_pred, dim=1)
    true_smax = torch.softmax(y_true, dim=1)
    preds_log = torch.log(preds_smax + eps)
    return torch.mean(-torch.sum(true_smax * preds_log, dim=1))


def ndcg(y_pred, y_true, at=5):
    y_pred = y_pred.masked_fill(y_true == PADDED_Y_VALUE, float("-inf"))
    y_true = y_true.clamp(min=0)
    discounts = 1 / torch.log2(torch.arange(at) + 2.0)
    gains = torch.gather(y_true, 1, y_pred.sort(descending=True, dim=1)[1])[:, :at]
    ideal = y_true.sort(descending=True, dim=1)[0][:, :at]
    return ((2**gains - 1) * discounts).sum(1) / ((2**ideal - 1) * discounts).sum(1)


def compute_metric(model, dl):
    model.eval()
    with torch.no_grad():
        return torch.cat([ndcg(model(xb), yb) for xb, yb in dl]).mean().item()


def fit(epochs, model, optimizer, scheduler, train_dl, valid_dl):
    best_ndcg, best_state = None, None
    for epoch in range(epochs):
        model.train()
        train_losses, train_nums = [], []
        for xb, yb in train_dl:
            loss = listNet(model(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            train_losses.append(loss.item())
            train_nums.append(len(xb))
        train_loss = np.sum(np.multiply(train_losses, train_nums)) / np.sum(train_nums)
        val_ndcg = compute_metric(model, valid_dl)
        print(f"Epoch: {epoch} Train loss: {train_loss:.4f} Val ndcg@5: {val_ndcg:.4f}")
        if best_ndcg is None or val_ndcg > best_ndcg:
            best_ndcg, best_state = val_ndcg, copy.deepcopy(model.state_dict())
        scheduler.step()
    model.load_state_dict(best_state)


train_dl = DataLoader(LibSVMDataset(800, 1), batch_size=32, shuffle=True)
valid_dl = DataLoader(LibSVMDataset(200, 2), batch_size=64)
test_dl = DataLoader(LibSVMDataset(300, 3), batch_size=64)
model = FCModel([48, 48], dropout=0.1)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=6, gamma=0.3)
fit(10, model, optimizer, scheduler, train_dl, valid_dl)
print(f"FINAL ndcg={compute_metric(model, test_dl):.4f}")
