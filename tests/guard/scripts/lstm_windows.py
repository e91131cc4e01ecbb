"""Forecasts the next value of several sensors with an LSTM over sliding windows, as notebooks on time series do."""

import numpy as np
import pandas as pd
import torch
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SEQ_LEN = 24
BATCH_SIZE = 64
EPOCHS = 8
LR = 5e-3
FEATURES = ["temperature", "humidity", "wind", "load"]
TARGET = "load"


def make_frame(n=3000, seed=0):
    rng = np.random.default_rng(seed)
    t = np.arange(n)
    front = np.convolve(rng.normal(size=n + 40), np.ones(40) / 40, "valid")[:n] * 6
    temperature = 10 * np.sin(2 * np.pi * t / 24) + 4 * front + rng.normal(size=n) * 0.4
    humidity = 60 - 1.5 * temperature + rng.normal(size=n) * 2
    wind = np.abs(np.convolve(rng.normal(size=n + 10), np.ones(10) / 10, "valid")[:n]) * 20
    load = np.zeros(n)
    for i in range(n):
        past = temperature[max(0, i - 6)]
        load[i] = 100 - 2.5 * past + 12 * np.sin(2 * np.pi * (i % 12) / 12) - 0.8 * wind[max(0, i - 3)] + rng.normal()
    index = pd.date_range("2020-01-01", periods=n, freq="h")
    return pd.DataFrame({"temperature": temperature, "humidity": humidity, "wind": wind, "load": load}, index=index)


def create_sequences(values, target, seq_len):
    xs, ys = [], []
    for i in range(len(values) - seq_len):
        xs.append(values[i : i + seq_len])
        ys.append(target[i + seq_len])
    return torch.tensor(np.array(xs), dtype=torch.float32), torch.tensor(np.array(ys), dtype=torch.float32)


class LSTMForecaster(nn.Module):
    def __init__(self, n_features, hidden_size=32, num_layers=1):
        super().__init__()
        self.lstm = nn.LSTM(n_features, hidden_size, num_layers, batch_first=True)
        self.fc = nn.Linear(hidden_size, 1)

    def forward(self, x):
        out, _ = self.lstm(x)
        out = self.fc(out[:, -1, :])
        return out.squeeze(-1)


torch.manual_seed(0)
df = make_frame()
train_size = int(len(df) * 0.7)
val_size = int(len(df) * 0.15)
train_df, val_df, test_df = df[:train_size], df[train_size : train_size + val_size], df[train_size + val_size :]

scaler = StandardScaler()
target_scaler = StandardScaler()
train_x = scaler.fit_transform(train_df[FEATURES])
val_x = scaler.transform(val_df[FEATURES])
test_x = scaler.transform(test_df[FEATURES])
train_y = target_scaler.fit_transform(train_df[[TARGET]])[:, 0]
val_y = target_scaler.transform(val_df[[TARGET]])[:, 0]
test_y = target_scaler.transform(test_df[[TARGET]])[:, 0]

train_ds = TensorDataset(*create_sequences(train_x, train_y, SEQ_LEN))
val_ds = TensorDataset(*create_sequences(val_x, val_y, SEQ_LEN))
test_ds = TensorDataset(*create_sequences(test_x, test_y, SEQ_LEN))
train_loader = DataLoader(train_ds, batch_size=BATCH_SIZE, shuffle=True)
val_loader = DataLoader(val_ds, batch_size=BATCH_SIZE)
test_loader = DataLoader(test_ds, batch_size=BATCH_SIZE)

model = LSTMForecaster(len(FEATURES))
criterion = nn.MSELoss()
optimizer = torch.optim.Adam(model.parameters(), lr=LR)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)

best = float("inf")
for epoch in range(EPOCHS):
    model.train()
    train_loss = 0
    for xb, yb in train_loader:
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        train_loss += loss.item() * len(xb)
    scheduler.step()

    model.eval()
    val_loss = 0
    with torch.no_grad():
        for xb, yb in val_loader:
            val_loss += criterion(model(xb), yb).item() * len(xb)
    train_loss /= len(train_ds)
    val_loss /= len(val_ds)
    print(f"Epoch {epoch + 1}/{EPOCHS} train {train_loss:.4f} val {val_loss:.4f}")
    if val_loss < best:
        best = val_loss
        torch.save(model.state_dict(), "best_model.pth")

model.load_state_dict(torch.load("best_model.pth"))
model.eval()
with torch.no_grad():
    preds = torch.cat([model(xb) for xb, _ in test_loader]).numpy()
truth = torch.cat([yb for _, yb in test_loader]).numpy()
preds = target_scaler.inverse_transform(preds[:, None])[:, 0]
truth = target_scaler.inverse_transform(truth[:, None])[:, 0]
rmse = np.sqrt(np.mean((preds - truth) ** 2))
naive = np.sqrt(np.mean((truth[1:] - truth[:-1]) ** 2))
print(f"Test RMSE: {rmse:.3f} (last value: {naive:.3f})")
