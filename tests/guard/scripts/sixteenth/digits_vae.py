"""A variational autoencoder on 8x8 digits; the score is the share of the variance that its reconstructions explain on held-out digits."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader

SEED = 0
torch.manual_seed(SEED)
pixels = torch.tensor(load_digits().data / 16.0, dtype=torch.float32)
pixels = pixels[torch.randperm(len(pixels))]
train_set, test_set = pixels[:1400], pixels[1400:]
loader = DataLoader(train_set, batch_size=64, shuffle=True)


class VAE(nn.Module):
    def __init__(self, z_dim=8):
        super().__init__()
        self.enc = nn.Linear(64, 128)
        self.fc_mu = nn.Linear(128, z_dim)
        self.fc_logvar = nn.Linear(128, z_dim)
        self.dec1 = nn.Linear(z_dim, 128)
        self.dec2 = nn.Linear(128, 64)

    def encode(self, x):
        h = F.relu(self.enc(x))
        return self.fc_mu(h), self.fc_logvar(h)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        return mu + torch.randn_like(std) * std

    def decode(self, z):
        return torch.sigmoid(self.dec2(F.relu(self.dec1(z))))

    def forward(self, x):
        mu, logvar = self.encode(x)
        return self.decode(self.reparameterize(mu, logvar)), mu, logvar


def loss_function(recon_x, x, mu, logvar):
    BCE = F.binary_cross_entropy(recon_x, x, reduction="sum")
    KLD = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return BCE + KLD


model = VAE()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for epoch in range(40):
    model.train()
    train_loss = 0.0
    for batch in loader:
        optimizer.zero_grad()
        recon, mu, logvar = model(batch)
        loss = loss_function(recon, batch, mu, logvar)
        loss.backward()
        optimizer.step()
        train_loss += loss.item()
    if epoch % 10 == 9:
        print(f"epoch {epoch + 1}, loss per image {train_loss / len(train_set):.2f}")

model.eval()
with torch.no_grad():
    mu, _ = model.encode(test_set)
    error = ((model.decode(mu) - test_set) ** 2).sum()
    spread = ((test_set - train_set.mean(0)) ** 2).sum()
print(f"FINAL explained={1 - (error / spread).item():.4f}")
