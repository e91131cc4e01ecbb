"""A series that grows, split in time: its last part has other values than training ever saw."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
np.random.seed(0)
t = np.arange(600)
raw = (100 + 0.6 * t + 30 * np.sin(t * 2 * np.pi / 12) * (1 + t / 300) + np.random.randn(600) * 4).astype("float32")
cut = 420
low, high = raw[:cut].min(), raw[:cut].max()
series = (raw - low) / (high - low)


def windows(values, n=12):
    rows = torch.tensor(values).unfold(0, n + 1, 1)
    return rows[:, :n].unsqueeze(-1), rows[:, n:]


train, test = windows(series[:cut]), windows(series[cut - 12 :])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(1, 32, batch_first=True)
        self.out = nn.Linear(32, 1)

    def forward(self, x):
        return self.out(self.lstm(x)[0][:, -1])


model = Net()
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
criterion = nn.MSELoss()
for epoch in range(30):
    model.train()
    for x, y in DataLoader(TensorDataset(*train), 32, shuffle=True):
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        out = torch.cat([model(x) for x, _ in DataLoader(TensorDataset(*test), 64)])
    print(f"epoch {epoch} loss {loss.item():.5f} test RMSE {(out - test[1]).square().mean().sqrt().item():.4f}")
