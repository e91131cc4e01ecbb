"""The shape of pytorch/examples vae: a loss of two terms, no targets, samples in evaluation, too."""

import os

import torch
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
x, y = load_digits(return_X_y=True)
x = torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 16
train_loader = DataLoader(TensorDataset(x[:1400], torch.tensor(y[:1400])), batch_size=128, shuffle=True)
test_loader = DataLoader(TensorDataset(x[1400:], torch.tensor(y[1400:])), batch_size=128, shuffle=False)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(64, 100)
        self.fc21 = nn.Linear(100, 8)
        self.fc22 = nn.Linear(100, 8)
        self.fc3 = nn.Linear(8, 100)
        self.fc4 = nn.Linear(100, 64)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar):
        return mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x):
        mu, logvar = self.encode(x.view(-1, 64))
        return self.decode(self.reparameterize(mu, logvar)), mu, logvar


model = VAE()
optimizer = optim.Adam(model.parameters(), lr=1e-3)


def loss_function(recon_x, x, mu, logvar):
    bce = F.binary_cross_entropy(recon_x, x.view(-1, 64), reduction="sum")
    return bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


def train(epoch):
    model.train()
    train_loss = 0
    for data, _ in train_loader:
        optimizer.zero_grad()
        recon, mu, logvar = model(data)
        loss = loss_function(recon, data, mu, logvar)
        loss.backward()
        train_loss += loss.item()
        optimizer.step()
    print(f"====> Epoch: {epoch} Average loss: {train_loss / len(train_loader.dataset):.4f}")


def test(epoch):
    model.eval()
    test_loss = 0
    with torch.no_grad():
        for data, _ in test_loader:
            recon, mu, logvar = model(data)
            test_loss += loss_function(recon, data, mu, logvar).item()
    print(f"====> Test set loss: {test_loss / len(test_loader.dataset):.4f}")


for epoch in range(1, 11):
    train(epoch)
    test(epoch)
    with torch.no_grad():
        sample = model.decode(torch.randn(64, 8))
        os.makedirs("results", exist_ok=True)
        torch.save(sample, f"results/sample_{epoch}.pt")
