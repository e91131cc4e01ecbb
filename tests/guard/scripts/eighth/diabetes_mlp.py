"""Diabetes progression from ten columns: an MLP on standardised columns, early stopping, the best weights are loaded for the test."""

import copy

import numpy as np
import torch
import torch.nn as nn
from sklearn.datasets import load_diabetes
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch.utils.data import DataLoader, TensorDataset

SEED = 0
torch.manual_seed(SEED)
np.random.seed(SEED)

EPOCHS = 300
PATIENCE = 60

X, y = load_diabetes(return_X_y=True, scaled=False)
y = y.reshape(-1, 1)
X_train, X_test, y_train, y_test = train_test_split(X, y, test_size=0.25, random_state=SEED)
X_train, X_val, y_train, y_val = train_test_split(X_train, y_train, test_size=0.25, random_state=SEED)

x_scaler, y_scaler = StandardScaler(), StandardScaler()
X_train = x_scaler.fit_transform(X_train)
X_val = x_scaler.transform(X_val)
X_test = x_scaler.transform(X_test)
y_train = y_scaler.fit_transform(y_train)
y_val = y_scaler.transform(y_val)


def to_tensor(a):
    return torch.tensor(a, dtype=torch.float32)


train_loader = DataLoader(TensorDataset(to_tensor(X_train), to_tensor(y_train)), batch_size=32, shuffle=True)
val_loader = DataLoader(TensorDataset(to_tensor(X_val), to_tensor(y_val)), batch_size=64)


class MLP(nn.Module):
    def __init__(self, in_features, hidden=128):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(in_features, hidden),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 1),
        )

    def forward(self, x):
        return self.net(x)


model = MLP(X_train.shape[1])
criterion = nn.MSELoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

best_val, best_state, wait = float("inf"), None, 0
for epoch in range(EPOCHS):
    model.train()
    train_loss = 0.0
    for xb, yb in train_loader:
        optimizer.zero_grad()
        pred = model(xb)
        loss = criterion(pred, yb)
        loss.backward()
        optimizer.step()
        train_loss += loss.item() * len(xb)
    train_loss /= len(train_loader.dataset)

    model.eval()
    val_loss = 0.0
    with torch.no_grad():
        for xb, yb in val_loader:
            val_loss += criterion(model(xb), yb).item() * len(xb)
    val_loss /= len(val_loader.dataset)
    print(f"epoch {epoch + 1:3d}  train loss {train_loss:.4f}  val loss {val_loss:.4f}")

    if val_loss < best_val:
        best_val, wait = val_loss, 0
        best_state = copy.deepcopy(model.state_dict())
    else:
        wait += 1
        if wait >= PATIENCE:
            print("early stopping")
            break

model.load_state_dict(best_state)
model.eval()
with torch.no_grad():
    prediction = y_scaler.inverse_transform(model(to_tensor(X_test)).numpy())
rmse = float(np.sqrt(((prediction - y_test) ** 2).mean()))
print(f"FINAL rmse={rmse:.3f}")
