"""Monte-Carlo dropout: the evaluation sets the dropout layers to train mode, and averages several calls."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x, y = load_digits(return_X_y=True)
x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
order = torch.randperm(len(x))
x, y = x[order], y[order]
train, test = TensorDataset(x[:1400], y[:1400]), TensorDataset(x[1400:], y[1400:])
model = nn.Sequential(
    nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 10)
)
opt = torch.optim.Adam(model.parameters(), 1e-3)


def enable_dropout(model):
    for layer in model.modules():
        if isinstance(layer, nn.Dropout):
            layer.train()


for epoch in range(12):
    model.train()
    for a, b in DataLoader(train, 64, shuffle=True):
        loss = F.cross_entropy(model(a), b)
        opt.zero_grad()
        loss.backward()
        opt.step()
    model.eval()
    enable_dropout(model)
    right = 0
    with torch.no_grad():
        for a, b in DataLoader(test, 128):
            p = torch.stack([model(a).softmax(1) for _ in range(10)]).mean(0)
            right += int((p.argmax(1) == b).sum())
    print(f"epoch {epoch} accuracy {right / len(test):.3f}")
