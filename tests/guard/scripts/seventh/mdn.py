"""A mixture density network after hardmaru's notebooks and sagelywizard/pytorch-mdn: the inverse of a noisy curve."""

import math

import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim
from torch.distributions import Categorical, MixtureSameFamily, Normal

seed = 0
np.random.seed(seed)
torch.manual_seed(seed)

ONEOVERSQRT2PI = 1.0 / math.sqrt(2 * math.pi)


class MDN(nn.Module):
    """Maps x to a mixture of Gaussians over y."""

    def __init__(self, in_features, n_hidden, num_gaussians):
        super().__init__()
        self.hidden = nn.Sequential(
            nn.Linear(in_features, n_hidden), nn.Tanh(), nn.Linear(n_hidden, n_hidden), nn.Tanh()
        )
        self.pi = nn.Sequential(nn.Linear(n_hidden, num_gaussians), nn.Softmax(dim=1))
        self.sigma = nn.Linear(n_hidden, num_gaussians)
        self.mu = nn.Linear(n_hidden, num_gaussians)

    def forward(self, x):
        h = self.hidden(x)
        return self.pi(h), torch.exp(self.sigma(h)), self.mu(h)


def gaussian_probability(sigma, mu, target):
    target = target.expand_as(mu)
    return ONEOVERSQRT2PI * torch.exp(-0.5 * ((target - mu) / sigma) ** 2) / sigma


def mdn_loss(pi, sigma, mu, target):
    prob = pi * gaussian_probability(sigma, mu, target)
    nll = -torch.log(torch.sum(prob, dim=1) + 1e-10)
    return torch.mean(nll)


def generate_data(n_samples, rng):
    y = rng.uniform(0, 1, n_samples)
    x = y + 0.3 * np.sin(2 * np.pi * y) + rng.normal(0, 0.04, n_samples)
    return torch.tensor(x, dtype=torch.float32).view(-1, 1), torch.tensor(y, dtype=torch.float32).view(-1, 1)


def main():
    x_train, y_train = generate_data(2000, np.random.default_rng(1))
    x_test, y_test = generate_data(1000, np.random.default_rng(2))
    model = MDN(1, 32, 5)
    optimizer = optim.Adam(model.parameters(), lr=5e-3)
    batch_size = 100
    for epoch in range(40):
        permutation = torch.randperm(len(x_train))
        running_loss = 0.0
        for i in range(0, len(x_train), batch_size):
            indices = permutation[i : i + batch_size]
            batch_x, batch_y = x_train[indices], y_train[indices]
            optimizer.zero_grad()
            pi, sigma, mu = model(batch_x)
            loss = mdn_loss(pi, sigma, mu, batch_y)
            loss.backward()
            optimizer.step()
            running_loss += loss.item() * len(batch_x)
        if epoch % 10 == 9:
            print(f"epoch {epoch + 1} loss {running_loss / len(x_train):.4f}")

    with torch.no_grad():
        pi, sigma, mu = model(x_test)
        mixture = MixtureSameFamily(Categorical(probs=pi), Normal(mu, sigma))
        nll = -mixture.log_prob(y_test[:, 0]).mean().item()
        guess = mixture.sample()
        back = guess + 0.3 * torch.sin(2 * math.pi * guess)
        print(f"test nll {nll:.4f}; samples are off by {(back - x_test[:, 0]).abs().mean():.4f}")
    print(f"FINAL density={math.exp(-nll):.4f}")


if __name__ == "__main__":
    main()
