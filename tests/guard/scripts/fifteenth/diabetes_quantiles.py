"""Progression of diabetes a year later: the 10%, 50% and 90% quantile from ten measurements, by an MLP with the pinball loss."""

import torch
from sklearn.datasets import load_diabetes
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainworthy

SEED = 0
QUANTILES = torch.tensor([0.1, 0.5, 0.9])

X, y = load_diabetes(return_X_y=True)
X_train, X_val, y_train, y_val = train_test_split(X, y, test_size=0.25, random_state=1)
x_mean, x_std = X_train.mean(0), X_train.std(0)
y_mean, y_std = y_train.mean(), y_train.std()


def dataset(X, y):
    X = torch.tensor((X - x_mean) / x_std, dtype=torch.float32)
    y = torch.tensor((y - y_mean) / y_std, dtype=torch.float32)
    return TensorDataset(X, y)


train_set, val_set = dataset(X_train, y_train), dataset(X_val, y_val)


class QuantileNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 64), nn.ReLU())
        self.head = nn.Linear(64, 3)

    def forward(self, x):
        return self.head(self.body(x))


def pinball(predicted, target):
    error = target.unsqueeze(1) - predicted
    return torch.maximum(QUANTILES * error, (QUANTILES - 1) * error).mean()


def train_epoch(model, optimizer, loader):
    model.train()
    for x, target in loader:
        optimizer.zero_grad()
        loss = pinball(model(x), target)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def val_pinball(model, loader):
    """In units of the disease score."""
    model.eval()
    total, n = 0.0, 0
    with torch.no_grad():
        for x, target in loader:
            total += pinball(model(x), target).item() * len(x)
            n += len(x)
    return total / n * y_std


def constant_pinball():
    _, t = train_set.tensors
    return pinball(torch.quantile(t, QUANTILES).expand(len(t), 3), t).item() * y_std


def make_parts():
    model = QuantileNet()
    return model, torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)


def make_script():
    model, optimizer = make_parts()
    return trainworthy.Script(
        model=model,
        optimizer=optimizer,
        train=train_set,
        val=val_set,
        loss=lambda model, batch: pinball(model(batch[0]), batch[1]),
        metric=val_pinball,
        higher_is_better=False,
        floor=constant_pinball(),
        train_loop=train_epoch,
    )


def main():
    torch.manual_seed(SEED)
    model, optimizer = make_parts()
    train_loader, val_loader = DataLoader(train_set, 32, shuffle=True), DataLoader(val_set, 128)
    for epoch in range(30):
        train_epoch(model, optimizer, train_loader)
        if epoch % 10 == 9:
            print(epoch + 1, val_pinball(model, val_loader))
    print(f"FINAL pinball={val_pinball(model, val_loader):.4f}")


if __name__ == "__main__":
    main()
