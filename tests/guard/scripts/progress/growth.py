"""A Gaussian with its own variance for each sample: the log-likelihood is maximised, R2 and MAE are printed at the end."""

import logging

import numpy as np
import torch
from sklearn.datasets import load_diabetes
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", force=True)
torch.manual_seed(1)
x, y = load_diabetes(return_X_y=True)
x, y = torch.tensor(x / x.std(0), dtype=torch.float32), torch.tensor((y - y.mean()) / y.std(), dtype=torch.float32)
order = torch.as_tensor(np.random.default_rng(0).permutation(len(x)))
x, y = x[order], y[order]


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 32), nn.Tanh())
        self.mean, self.log_var = nn.Linear(32, 1), nn.Linear(32, 1)

    def forward(self, x):
        h = self.body(x)
        return self.mean(h).squeeze(1), self.log_var(h).squeeze(1).clamp(-4, 4)


model = Head()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, maximize=True)
loader = DataLoader(TensorDataset(x[:350], y[:350]), batch_size=25, shuffle=True)
for epoch in range(30):
    for a, b in loader:
        mean, log_var = model(a)
        likelihood = -0.5 * (log_var + (b - mean) ** 2 / log_var.exp()).mean()
        optimizer.zero_grad()
        likelihood.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    logging.info("epoch %d log-likelihood %.4f", epoch, likelihood.item())
with torch.no_grad():
    mean, _ = model(x[350:])
error = mean - y[350:]
logging.info("test MAE=%.4f R2=%.4f", error.abs().mean(), 1 - (error**2).mean() / y[350:].var())
