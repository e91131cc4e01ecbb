"""A VAE on 8x8 digits: Bernoulli likelihood, KL weight that warms up over the first 300 steps; the score is the negative ELBO in nats."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import trainworthy

SEED = 0
LATENT, WARMUP = 8, 300
x = torch.tensor(load_digits().data / 16.0, dtype=torch.float32)
train_set, val_set = TensorDataset(x[:1500]), TensorDataset(x[1500:])


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 2 * LATENT))
        self.decoder = nn.Sequential(nn.Linear(LATENT, 128), nn.ReLU(), nn.Linear(128, 64))

    def forward(self, x):
        mu, logvar = self.encoder(x).chunk(2, dim=1)
        z = mu + torch.exp(0.5 * logvar) * torch.randn_like(mu)
        return self.decoder(z), mu, logvar


def terms(model, x):
    logits, mu, logvar = model(x)
    reconstruction = F.binary_cross_entropy_with_logits(logits, x, reduction="none").sum(1)
    kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1)
    return reconstruction.mean(), kl.mean()


class Trainer:
    def __init__(self):
        self.model = VAE()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=2e-3)
        self.step = 0

    def train_epoch(self, loader):
        self.model.train()
        for (x,) in loader:
            beta = min(1.0, self.step / WARMUP)
            reconstruction, kl = terms(self.model, x)
            loss = reconstruction + beta * kl
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.step += 1

    @torch.no_grad()
    def negative_elbo(self):
        self.model.eval()
        total = 0.0
        generator_state = torch.get_rng_state()
        torch.manual_seed(123)
        for (x,) in DataLoader(val_set, 100):
            total += sum(terms(self.model, x)).item() * len(x)
        torch.set_rng_state(generator_state)
        return total / len(val_set)


def make_script():
    trainer = Trainer()
    return trainworthy.Loop(
        models=trainer.model,
        optimizers=trainer.optimizer,
        batches=DataLoader(train_set, batch_size=64, shuffle=True),
        run=trainer.train_epoch,
        evaluate=trainer.negative_elbo,
        target="0",
        higher_is_better=False,
    )


def main():
    torch.manual_seed(SEED)
    trainer = Trainer()
    loader = DataLoader(train_set, batch_size=64, shuffle=True)
    for epoch in range(40):
        trainer.train_epoch(loader)
        if epoch % 10 == 9:
            print(epoch + 1, trainer.negative_elbo())
    print(f"FINAL nats={trainer.negative_elbo():.3f}")


if __name__ == "__main__":
    main()
