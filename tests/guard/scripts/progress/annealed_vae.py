"""A variational autoencoder whose KL term is annealed: the loss that is printed rises while the model gets better."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.tensor(load_digits().data, dtype=torch.float32) / 16
train, test = DataLoader(TensorDataset(x[:1500]), 50, shuffle=True), DataLoader(TensorDataset(x[1500:]), 99)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))
        self.decode = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64))

    def forward(self, x):
        mean, log_var = self.encode(x).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (log_var / 2).exp()
        return self.decode(z), mean, log_var


def loss_of(model, x, beta):
    out, mean, log_var = model(x)
    rebuilt = F.binary_cross_entropy_with_logits(out, x, reduction="sum") / len(x)
    return rebuilt + beta * -0.5 * (1 + log_var - mean**2 - log_var.exp()).sum(1).mean()


model = VAE()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
epochs = 16
for epoch in range(epochs):
    beta = 4 * max(0.0, epoch - 3) / epochs
    model.train()
    for (a,) in train:
        loss = loss_of(model, a, beta)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        val = sum(loss_of(model, a, beta).item() for (a,) in test) / len(test)
    print(f"epoch {epoch} beta {beta:.2f} train loss {loss.item():.3f} val loss {val:.3f}")
