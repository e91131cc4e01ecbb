"""The checks on any training loop, here a variational autoencoder: `python examples/loop.py` checks it, then trains."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import trainworthy

images = torch.tensor(load_digits().data, dtype=torch.float32) / 16  # (1797, 64) in [0, 1]
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
train_set, val_set = TensorDataset(images[order[:1437]]), TensorDataset(images[order[1437:]])


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))
        self.decoder = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        """The negative evidence lower bound in nats per image, with one random draw."""
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        drawn = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        reconstruction = F.binary_cross_entropy_with_logits(self.decoder(drawn), x, reduction="sum")
        divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum()
        return (reconstruction + divergence) / len(x)


def train_one_epoch(model: nn.Module, optimizer: torch.optim.Optimizer, batches) -> None:
    model.train()
    for (x,) in batches:
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()


def validate(model: nn.Module) -> float:
    model.eval()
    with torch.no_grad():
        return sum(model(x).item() * len(x) for (x,) in DataLoader(val_set, 256)) / len(val_set)


def factory() -> trainworthy.Loop:
    """New models and optimisers at every call."""
    model = Vae()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return trainworthy.Loop(
        models=model,  # or a dict of several: {"generator": ..., "critic": ...}
        optimizers=optimizer,
        batches=DataLoader(train_set, 64, shuffle=True),
        run=lambda batches: train_one_epoch(model, optimizer, batches),
        evaluate=lambda: validate(model),
    )


if __name__ == "__main__":
    trainworthy.check(factory)
    torch.manual_seed(0)
    loop = factory()
    for _ in range(10):
        loop.run(loop.batches)
    print(f"negative evidence lower bound {loop.evaluate():.2f} nats on {len(val_set)} held-out digits")
