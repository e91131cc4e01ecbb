"""The gates on a plain PyTorch script: `python examples/plain_script.py` checks it, then trains."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import trainworthy

digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16  # (1797, 64) in [0, 1]
labels = torch.tensor(digits.target)
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
learn, held_out = order[:1437], order[1437:]
train_set = TensorDataset(images[learn], labels[learn])
val_set = TensorDataset(images[held_out], labels[held_out])


def accuracy(model: nn.Module, loader: DataLoader) -> float:
    model.eval()
    with torch.no_grad():
        right = sum((model(x).argmax(1) == y).sum().item() for x, y in loader)
    return right / len(loader.dataset)


def train_epoch(model: nn.Module, optimizer: torch.optim.Optimizer, batches) -> None:
    model.train()
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def factory() -> trainworthy.Script:
    """A new model and a new optimiser at every call."""
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    return trainworthy.Script(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        train=train_set,
        val=val_set,
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        metric=accuracy,
        train_loop=train_epoch,
        classes=10,
    )


if __name__ == "__main__":
    trainworthy.check(factory)
    torch.manual_seed(0)
    script = factory()
    batches = DataLoader(train_set, 64, shuffle=True)
    for _ in range(20):
        train_epoch(script.model, script.optimizer, batches)
    print(f"accuracy {accuracy(script.model, DataLoader(val_set, 256)):.3f} on {len(val_set)} held-out digits")
