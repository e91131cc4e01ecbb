"""Sixty wines, thirteen columns, three cultivars: five folds in one script, full batches, a new net for each fold, the mean accuracy."""

import numpy as np
import torch
import torch.nn as nn
from sklearn.datasets import load_wine
from sklearn.model_selection import StratifiedKFold
from sklearn.preprocessing import StandardScaler
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
np.random.seed(0)
X, y = load_wine(return_X_y=True)
chosen = np.random.permutation(len(X))[:60]
X, y = X[chosen], y[chosen]

scores = []
for fold, (train_idx, val_idx) in enumerate(StratifiedKFold(5, shuffle=True, random_state=0).split(X, y)):
    scaler = StandardScaler().fit(X[train_idx])
    x_train, x_val = (torch.tensor(scaler.transform(X[i]), dtype=torch.float32) for i in (train_idx, val_idx))
    y_train, y_val = torch.tensor(y[train_idx]), torch.tensor(y[val_idx])
    loader = DataLoader(TensorDataset(x_train, y_train), batch_size=len(x_train), shuffle=True)
    model = nn.Sequential(nn.Linear(13, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-2)
    for epoch in range(80):
        model.train()
        for xb, yb in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(xb), yb)
            loss.backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        score = (model(x_val).argmax(1) == y_val).float().mean().item()
    scores.append(score)
    print(f"fold {fold}: loss {loss.item():.3f}, accuracy {score:.3f}")
print(f"FINAL accuracy={np.mean(scores):.4f}")
