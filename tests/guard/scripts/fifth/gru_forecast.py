# Forecast terrain elevation 4 samples ahead along west-east profiles (USGS DEM that ships with matplotlib)
import matplotlib.cbook as cbook
import numpy as np
import torch
import torch.nn as nn
from sklearn.preprocessing import StandardScaler
from torch.utils.data import DataLoader, TensorDataset

SEED = 0
torch.manual_seed(SEED)
np.random.seed(SEED)

window = 16
horizon = 4
batch_size = 64
hidden_size = 32
num_epochs = 6
learning_rate = 3e-3

dem = np.load(cbook.get_sample_data("jacksboro_fault_dem.npz", asfileobj=False))["elevation"].astype(np.float32)
print("dem", dem.shape, dem.min(), dem.max())


def profile(row):
    # elevation of the line itself and of the lines 6 rows north and south
    return np.stack([dem[row], dem[row - 6], dem[row + 6]], axis=1)


train_rows = range(10, 180, 34)
test_rows = range(220, 335, 28)
train_raw = [profile(r) for r in train_rows]
test_raw = [profile(r) for r in test_rows]

scaler = StandardScaler()
scaler.fit(np.concatenate(train_raw))
train_series = [scaler.transform(p) for p in train_raw]
test_series = [scaler.transform(p) for p in test_raw]


def make_windows(series):
    X, y = [], []
    for p in series:
        for i in range(len(p) - window - horizon + 1):
            X.append(p[i : i + window])
            y.append(p[i + window + horizon - 1, 0])
    return torch.tensor(np.array(X), dtype=torch.float32), torch.tensor(np.array(y), dtype=torch.float32)


X_train, y_train = make_windows(train_series)
X_test, y_test = make_windows(test_series)
print("windows", X_train.shape, X_test.shape)

train_loader = DataLoader(TensorDataset(X_train, y_train), batch_size=batch_size, shuffle=True)
test_loader = DataLoader(TensorDataset(X_test, y_test), batch_size=batch_size, shuffle=False)


class GRUNet(nn.Module):
    def __init__(self, n_features, hidden):
        super().__init__()
        self.gru = nn.GRU(n_features, hidden, num_layers=1)
        self.fc = nn.Sequential(nn.Linear(hidden, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x):
        x = x.transpose(0, 1)  # (seq, batch, feature)
        out, h = self.gru(x)
        return self.fc(out[-1]).squeeze(-1)


model = GRUNet(X_train.shape[-1], hidden_size)
criterion = nn.MSELoss()
optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)


def to_metres(y):
    return y * scaler.scale_[0] + scaler.mean_[0]


def evaluate(loader):
    model.eval()
    preds, trues = [], []
    with torch.no_grad():
        for xb, yb in loader:
            preds.append(model(xb))
            trues.append(yb)
    preds, trues = to_metres(torch.cat(preds).numpy()), to_metres(torch.cat(trues).numpy())
    return float(np.sqrt(np.mean((preds - trues) ** 2)))


for epoch in range(num_epochs):
    model.train()
    total = 0.0
    for xb, yb in train_loader:
        pred = model(xb)
        loss = criterion(pred, yb)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total += loss.item() * len(xb)
    print(
        f"epoch {epoch + 1}/{num_epochs} train mse {total / len(X_train):.4f} test rmse {evaluate(test_loader):.2f} m"
    )

naive = to_metres(X_test[:, -1, 0].numpy()) - to_metres(y_test.numpy())
print(f"persistence rmse {np.sqrt(np.mean(naive**2)):.2f} m")
print(f"FINAL rmse={evaluate(test_loader):.2f}")
