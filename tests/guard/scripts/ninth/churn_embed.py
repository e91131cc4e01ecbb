"""Customer churn: categorical embeddings and numeric columns, few positives, early stopping on the validation loss."""

import copy

import numpy as np
import torch
import torch.nn as nn
from sklearn.metrics import average_precision_score, balanced_accuracy_score
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch.utils.data import DataLoader, TensorDataset

seed = 0
rng = np.random.default_rng(seed)
torch.manual_seed(seed)

CAT_COLS = ["city", "plan", "channel", "device"]
N_CATS = [300, 6, 8, 12]


def make_table(n=7000):
    """A made-up table with the structure of the usual churn tables."""
    cats = np.stack([np.minimum(rng.geometric(2.5 / k, n) - 1, k - 1) for k in N_CATS], axis=1)
    tenure, charges = rng.gamma(2.0, 12.0, n), rng.gamma(3.0, 900.0, n)
    calls, age = rng.poisson(2.0, n), rng.normal(45, 13, n)
    effects = [rng.normal(0, 1.0, k) for k in N_CATS]
    score = sum(e[cats[:, j]] for j, e in enumerate(effects))
    score = score - 0.05 * tenure + 0.0006 * charges + 0.4 * np.maximum(calls - 2, 0) - 0.02 * np.abs(age - 45)
    score = score + effects[1][cats[:, 1]] * (calls - 2) * 0.5
    y = (score + rng.logistic(0, 0.7, n) > np.quantile(score, 0.92)).astype(np.float32)
    names = np.array([[f"{col}_{v * 617 % 1000:03d}" for col, v in zip(CAT_COLS, row)] for row in cats])
    return names, np.stack([tenure, charges, calls, age], axis=1), y


def fit_codes(column):
    return {name: i + 1 for i, name in enumerate(np.unique(column))}


def encode(names, codes):
    return np.array([[codes[j].get(v, 0) for j, v in enumerate(row)] for row in names])


class ChurnNet(nn.Module):
    def __init__(self, sizes, n_num):
        super().__init__()
        self.embeddings = nn.ModuleList([nn.Embedding(s, min(16, (s + 1) // 2)) for s in sizes])
        width = sum(e.embedding_dim for e in self.embeddings)
        self.bn = nn.BatchNorm1d(n_num)
        self.layers = nn.Sequential(
            nn.Linear(width + n_num, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1)
        )

    def forward(self, x_cat, x_num):
        x = torch.cat([e(x_cat[:, j]) for j, e in enumerate(self.embeddings)] + [self.bn(x_num)], dim=1)
        return self.layers(x).squeeze(1)


names, numbers, y = make_table()
tr, te = train_test_split(np.arange(len(y)), test_size=0.3, stratify=y, random_state=seed)
tr, va = train_test_split(tr, test_size=0.2, stratify=y[tr], random_state=seed)
codes = [fit_codes(names[tr][:, j]) for j in range(len(CAT_COLS))]
scaler = StandardScaler().fit(numbers[tr])


def dataset(idx):
    cat = torch.tensor(encode(names[idx], codes))
    num = torch.tensor(scaler.transform(numbers[idx]), dtype=torch.float32)
    return TensorDataset(cat, num, torch.tensor(y[idx]))


train_dl = DataLoader(dataset(tr), batch_size=128, shuffle=True)
valid_dl = DataLoader(dataset(va), batch_size=1024)
test_dl = DataLoader(dataset(te), batch_size=1024)

n_pos = y[tr].sum()
n_neg = len(tr) - n_pos
model = ChurnNet([k + 1 for k in N_CATS], numbers.shape[1])
criterion = nn.BCEWithLogitsLoss(pos_weight=torch.tensor(n_neg / n_pos, dtype=torch.float32))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, weight_decay=1e-5)


@torch.no_grad()
def run(dl):
    model.eval()
    out = [(model(c, x), t) for c, x, t in dl]
    logits, truth = torch.cat([a for a, _ in out]), torch.cat([b for _, b in out])
    return criterion(logits, truth).item(), torch.sigmoid(logits).numpy(), truth.numpy()


best_loss, best_weights, patience, bad_epochs = float("inf"), None, 5, 0
for epoch in range(30):
    model.train()
    for x_cat, x_num, target in train_dl:
        loss = criterion(model(x_cat, x_num), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    val_loss, prob, truth = run(valid_dl)
    print(f"{epoch:3d} val loss {val_loss:.4f}  AP {average_precision_score(truth, prob):.4f}")
    if val_loss < best_loss:
        best_loss, best_weights, bad_epochs = val_loss, copy.deepcopy(model.state_dict()), 0
    else:
        bad_epochs += 1
        if bad_epochs >= patience:
            print("early stopping")
            break

model.load_state_dict(best_weights)
_, prob, truth = run(test_dl)
print("test AP", round(average_precision_score(truth, prob), 4))
print(f"FINAL balanced_acc={balanced_accuracy_score(truth, prob > 0.5):.4f}")
