"""Digits with noisy labels: train, then fit a temperature on the validation part; report NLL and calibration error."""

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
np.random.seed(0)
x, y = load_digits(return_X_y=True)
flipped = np.random.rand(len(y)) < 0.1
y = np.where(flipped, np.random.randint(0, 10, len(y)), y)
x_train, x_rest, y_train, y_rest = train_test_split(x, y, test_size=0.5, random_state=0, stratify=y)
x_val, x_test, y_val, y_test = train_test_split(x_rest, y_rest, test_size=0.5, random_state=0)


def tensors(x, y):
    return torch.tensor(x / 16.0, dtype=torch.float32), torch.tensor(y, dtype=torch.long)


train_set = TensorDataset(*tensors(x_train, y_train))
x_val, y_val = tensors(x_val, y_val)
x_test, y_test = tensors(x_test, y_test)
loader = DataLoader(train_set, batch_size=32, shuffle=True)

model = nn.Sequential(
    nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.2),
    nn.Linear(128, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10),
)  # fmt: skip
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for epoch in range(30):
    model.train()
    total = 0.0
    for xb, yb in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(xb), yb)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(xb)
    if epoch % 5 == 4:
        print(f"epoch {epoch + 1}: train loss {total / len(train_set):.4f}")


class Scaled(nn.Module):
    """Divides the logits of a trained model by one learned temperature."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.log_temperature = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        with torch.no_grad():
            logits = self.model(x)
        return logits / self.log_temperature.exp()

    def fit(self, x, y):
        self.model.eval()
        optimizer = torch.optim.LBFGS([self.log_temperature], lr=0.1, max_iter=60)

        def closure():
            optimizer.zero_grad()
            loss = F.cross_entropy(self(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
        return self


def calibration_error(probabilities, y, bins=10):
    confidence, predicted = probabilities.max(dim=1)
    hit = (predicted == y).float()
    error = 0.0
    for low in torch.arange(bins) / bins:
        inside = (confidence > low) & (confidence <= low + 1 / bins)
        if inside.any():
            error += inside.float().mean() * (confidence[inside].mean() - hit[inside].mean()).abs()
    return float(error)


scaled = Scaled(model).fit(x_val, y_val)
scaled.eval()
with torch.no_grad():
    logits = scaled(x_test)
    nll = F.cross_entropy(logits, y_test).item()
    accuracy = (logits.argmax(1) == y_test).float().mean().item()
    error = calibration_error(logits.softmax(1), y_test)
print(f"temperature {scaled.log_temperature.exp().item():.2f}")
print(f"test accuracy {accuracy:.3f}, ECE {error:.3f}")
print(f"FINAL nll={nll:.3f}")
