"""House prices: numbers and three categories, log prices that are standardised, an MLP with embeddings. Reports the error in dollars."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import trainworthy

SEED = 0
DISTRICTS, KINDS, HEATING = 14, 4, 3


def make_houses(n=2400):
    rng = np.random.default_rng(11)
    district, kind, heating = rng.integers(0, DISTRICTS, n), rng.integers(0, KINDS, n), rng.integers(0, HEATING, n)
    area = rng.gamma(6, 25, n) + 30
    rooms = np.clip(np.round(area / 28 + rng.normal(0, 0.8, n)), 1, 12)
    year = rng.integers(1905, 2022, n)
    lot = area * rng.uniform(1, 6, n)
    distance = rng.exponential(6, n)
    level, premium = rng.normal(0, 0.35, DISTRICTS), np.array([0.0, 0.15, 0.3, -0.1])
    log_price = 9.2 + 0.75 * np.log(area) + 0.05 * np.log(lot) + level[district] + premium[kind]
    log_price += 0.003 * (year - 1960) + 0.04 * heating - 0.03 * distance + 0.02 * rooms + rng.normal(0, 0.09, n)
    numbers = np.stack([area, rooms, year, lot, distance], axis=1)
    return numbers, np.stack([district, kind, heating], axis=1), np.exp(log_price)


class Houses(Dataset):
    def __init__(self, numbers, categories, prices, scaler):
        self.numbers = ((numbers - scaler["mean"]) / scaler["std"]).astype(np.float32)
        self.categories = categories.astype(np.int64)
        self.targets = ((np.log(prices) - scaler["target_mean"]) / scaler["target_std"]).astype(np.float32)

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, i):
        return {"numbers": self.numbers[i], "categories": self.categories[i], "target": self.targets[i]}


class Net(nn.Module):
    def __init__(self, hidden=96):
        super().__init__()
        self.embed = nn.ModuleList([nn.Embedding(DISTRICTS, 8), nn.Embedding(KINDS, 4), nn.Embedding(HEATING, 4)])
        self.layers = nn.Sequential(
            nn.Linear(5 + 16, hidden),
            nn.ReLU(),
            nn.Dropout(0.05),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 1),
        )

    def forward(self, numbers, categories):
        embedded = [e(categories[:, i]) for i, e in enumerate(self.embed)]
        return self.layers(torch.cat([numbers, *embedded], dim=1)).squeeze(-1)


def fit_scaler(numbers, prices):
    logs = np.log(prices)
    return {"mean": numbers.mean(0), "std": numbers.std(0), "target_mean": logs.mean(), "target_std": logs.std()}


def load():
    numbers, categories, prices = make_houses()
    order = np.random.default_rng(3).permutation(len(prices))
    train, val = order[:1900], order[1900:]
    scaler = fit_scaler(numbers[train], prices[train])
    sets = [Houses(numbers[part], categories[part], prices[part], scaler) for part in (train, val)]
    return *sets, scaler


train_set, val_set, scaler = load()


def loss_fn(model, batch):
    return nn.functional.huber_loss(model(batch["numbers"], batch["categories"]), batch["target"])


def train_epoch(model, optimizer, loader):
    model.train()
    for batch in loader:
        optimizer.zero_grad()
        loss = loss_fn(model, batch)
        loss.backward()
        optimizer.step()


def to_dollars(scaled):
    return torch.exp(scaled * scaler["target_std"] + scaler["target_mean"])


@torch.no_grad()
def mean_absolute_error(model, loader):
    """In dollars."""
    model.eval()
    errors = []
    for batch in loader:
        predicted = to_dollars(model(batch["numbers"], batch["categories"]))
        errors.append((predicted - to_dollars(batch["target"])).abs())
    return torch.cat(errors).mean().item()


def make_script():
    model = Net()
    prices = to_dollars(torch.tensor(val_set.targets))
    return trainworthy.Script(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=2e-3),
        train=train_set,
        val=val_set,
        batch_size=64,
        loss=loss_fn,
        metric=mean_absolute_error,
        train_loop=train_epoch,
        target="target",
        higher_is_better=False,
        floor=(prices - prices.median()).abs().mean().item(),
    )


def main():
    torch.manual_seed(SEED)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    train_loader, val_loader = DataLoader(train_set, 64, shuffle=True), DataLoader(val_set, 256)
    for epoch in range(40):
        train_epoch(model, optimizer, train_loader)
        if epoch % 5 == 4:
            print(f"epoch {epoch + 1}: mean absolute error {mean_absolute_error(model, val_loader):.0f} dollars")
    print(f"FINAL mae={mean_absolute_error(model, val_loader):.0f}")


if __name__ == "__main__":
    main()
