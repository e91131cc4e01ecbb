"""Ten inputs, y = the sum of their sines: an MLP that I ported from Keras."""

import numpy as np
import torch
import torch.nn as nn
from sklearn.preprocessing import StandardScaler

SEED = 0
torch.manual_seed(SEED)
rng = np.random.RandomState(SEED)


def make_data(n):
    features = rng.normal(0, 1, size=(n, 10)) * np.linspace(0.5, 1.5, 10) + np.linspace(-1, 1, 10)
    return features, np.sin(features).sum(axis=1)


X_train, y_train = make_data(3000)
X_test, y_test = make_data(600)

scaler_x, scaler_y = StandardScaler(), StandardScaler()
X_train = scaler_x.fit_transform(X_train)
X_test = scaler_x.transform(X_test)
y_train = scaler_y.fit_transform(y_train.reshape(-1, 1))

X_train = torch.tensor(X_train, dtype=torch.float32)
y_train = torch.tensor(y_train, dtype=torch.float32)
X_test = torch.tensor(X_test, dtype=torch.float32)


class MLP(nn.Module):
    def __init__(self, n_in=10, n_hidden=64, n_layers=2):
        super().__init__()
        self.first = nn.Linear(n_in, n_hidden)
        self.hidden = nn.ModuleList([nn.Linear(n_hidden, n_hidden) for _ in range(n_layers)])
        self.last = nn.Linear(n_hidden, 1)

    def forward(self, x):
        x = torch.relu(self.first(x))
        for layer in self.hidden:
            x = torch.relu(layer(x))
        return self.last(x)


model = MLP()
loss_fn = nn.MSELoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
batch_size = 50

for epoch in range(30):
    model.train()
    permutation = torch.randperm(len(X_train))
    total = 0.0
    for i in range(0, len(X_train), batch_size):
        indices = permutation[i : i + batch_size]
        xb, yb = X_train[indices], y_train[indices]
        pred = model(xb)
        loss = loss_fn(pred, yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    if epoch % 5 == 4:
        print("epoch", epoch, "loss", total / (len(X_train) // batch_size))

model.eval()
with torch.no_grad():
    predicted = scaler_y.inverse_transform(model(X_test).numpy()).ravel()
r2 = 1 - ((predicted - y_test) ** 2).sum() / ((y_test - y_test.mean()) ** 2).sum()
print(f"FINAL r2={r2:.4f}")
