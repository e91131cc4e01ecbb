"""An LSTM that forecasts a week of daily sales from the four weeks before it; mean absolute error on the last part of the series."""

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

SEED = 0
torch.manual_seed(SEED)
np.random.seed(SEED)

days = np.arange(1500)
series = (
    100
    + 0.01 * days
    + 20 * np.sin(2 * np.pi * days / 7)
    + 8 * np.sin(2 * np.pi * days / 30.5)
    + 4 * np.random.randn(1500)
)
train_part, test_part = series[:1200], series[1200:]
mean, std = train_part.mean(), train_part.std()
HISTORY, HORIZON = 28, 7


class Windows(Dataset):
    def __init__(self, values):
        self.values = torch.tensor((values - mean) / std, dtype=torch.float32)

    def __len__(self):
        return len(self.values) - HISTORY - HORIZON + 1

    def __getitem__(self, i):
        past = self.values[i : i + HISTORY]
        future = self.values[i + HISTORY : i + HISTORY + HORIZON]
        return past.unsqueeze(-1), future.unsqueeze(-1)


class Forecaster(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.encoder = nn.LSTM(1, hidden, batch_first=True)
        self.decoder = nn.LSTMCell(1, hidden)
        self.out = nn.Linear(hidden, 1)

    def forward(self, past, future=None):
        _, (h, c) = self.encoder(past)
        h, c = h[0], c[0]
        value = past[:, -1]
        outputs = []
        for t in range(HORIZON):
            h, c = self.decoder(value, (h, c))
            prediction = self.out(h)
            outputs.append(prediction)
            if future is not None and torch.rand(1).item() < 0.5:
                value = future[:, t]
            else:
                value = prediction
        return torch.stack(outputs, dim=1)


train_loader = DataLoader(Windows(train_part), batch_size=32, shuffle=True)
test_loader = DataLoader(Windows(test_part), batch_size=64)
model = Forecaster()
criterion = nn.MSELoss()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for epoch in range(12):
    model.train()
    losses = []
    for past, future in train_loader:
        optimizer.zero_grad()
        loss = criterion(model(past, future), future)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    print(f"epoch {epoch} train mse {np.mean(losses):.4f}")

model.eval()
errors = []
with torch.no_grad():
    for past, future in test_loader:
        forecast = model(past)
        errors.append((forecast - future).abs() * std)
print(f"FINAL mae={torch.cat(errors).mean().item():.4f}")
