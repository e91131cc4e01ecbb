"""Used cars: log price from four numbers and two categories; the newest offers are held out, ReduceLROnPlateau, early stopping."""

import copy

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainworthy

N, MAKES, FUELS = 3000, 12, 4

rng = np.random.default_rng(3)
day = np.sort(rng.uniform(0, 1, N))  # offers are listed by date; cars get older and prices rise a little
age = rng.gamma(2.0, 3.0, N) + 1.5 * day
mileage = 14000 * age * rng.lognormal(0, 0.35, N)
power = rng.normal(95, 25, N).clip(40)
doors = rng.choice([3, 5], N, p=[0.2, 0.8])
make, fuel = rng.integers(0, MAKES, N), rng.choice(FUELS, N, p=[0.5, 0.35, 0.1, 0.05])
value = rng.normal(0, 0.35, MAKES)[make] + np.array([0.0, 0.05, 0.3, -0.2])[fuel]
log_price = 9.5 + value + 0.006 * power - 0.11 * age - 2e-6 * mileage + 0.1 * day + rng.normal(0, 0.12, N)

numbers = np.stack([age, mileage, power, doors], 1).astype(np.float32)
cut = int(0.8 * N)
mean, std = numbers[:cut].mean(0), numbers[:cut].std(0)
y_mean, y_std = log_price[:cut].mean(), log_price[:cut].std()


def dataset(rows):
    return TensorDataset(
        torch.from_numpy((numbers[rows] - mean) / std),
        torch.from_numpy(np.stack([make[rows], fuel[rows]], 1)),
        torch.from_numpy(((log_price[rows] - y_mean) / y_std).astype(np.float32)),
    )


train_set, val_set = dataset(slice(0, cut)), dataset(slice(cut, None))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.make, self.fuel = nn.Embedding(MAKES, 6), nn.Embedding(FUELS, 2)
        self.layers = nn.Sequential(
            nn.Linear(12, 64), nn.SiLU(), nn.Dropout(0.1), nn.Linear(64, 32), nn.SiLU(), nn.Linear(32, 1)
        )

    def forward(self, numbers, categories):
        embedded = [self.make(categories[:, 0]), self.fuel(categories[:, 1])]
        return self.layers(torch.cat([numbers, *embedded], 1)).squeeze(1)


def loss_of(model, batch):
    numbers, categories, target = batch
    return nn.functional.smooth_l1_loss(model(numbers, categories), target)


def train_epoch(model, optimizer, batches):
    model.train()
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()


@torch.no_grad()
def percent_error(model, loader):
    """Median error of the price in percent."""
    model.eval()
    errors = []
    for numbers, categories, target in loader:
        errors.append(((model(numbers, categories) - target) * y_std).expm1().abs())
    return 100 * torch.cat(errors).median().item()


def make_script():
    model = Net()
    return trainworthy.Script(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-3),
        train=DataLoader(train_set, 64, shuffle=True, drop_last=True),
        val=DataLoader(val_set, 256),
        loss=loss_of,
        metric=percent_error,
        train_loop=train_epoch,
        target="2",
        higher_is_better=False,
        floor=40.0,
    )


def main():
    torch.manual_seed(0)
    script = make_script()
    model, optimizer = script.model, script.optimizer
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=2)
    best, best_state, waited = float("inf"), None, 0
    for epoch in range(40):
        train_epoch(model, optimizer, script.train)
        error = percent_error(model, script.val)
        scheduler.step(error)
        if error < best:
            best, best_state, waited = error, copy.deepcopy(model.state_dict()), 0
        else:
            waited += 1
        print(f"epoch {epoch}: median error {error:.2f}%")
        if waited == 6:
            break
    model.load_state_dict(best_state)
    print(f"FINAL error={percent_error(model, script.val):.3f}")


if __name__ == "__main__":
    main()
