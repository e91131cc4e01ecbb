"""Human activity from six sensor channels: convolutions and a Transformer encoder, new persons in the test, macro F1."""

import argparse

import numpy as np
import torch
from sklearn.metrics import f1_score
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

ACTIVITIES = ["sit", "stand", "walk", "run", "stairs", "cycle"]
SHARE = [0.3, 0.2, 0.25, 0.08, 0.07, 0.1]


def record(person, activity, rng, length=64):
    """One window (length, 6): acceleration and rotation of a wrist."""
    t = np.arange(length) / 16.0 + rng.uniform(0, 4)
    pace, strength = person["pace"], person["strength"]
    x = rng.normal(0, 0.25, (length, 6))
    x[:, 0] += np.sin(person["angle"])
    x[:, 2] += np.cos(person["angle"])
    if activity == 1:
        x[:, 0] += 0.5
        x[:, 1] += 0.15 * np.sin(2 * np.pi * 0.3 * t)
    elif activity >= 2:
        beat = {2: 1.0, 3: 1.6, 4: 0.9, 5: 1.2}[activity] * pace
        wave = np.sin(2 * np.pi * beat * t)
        size = strength * {2: 0.6, 3: 1.2, 4: 0.7, 5: 0.3}[activity]
        x[:, 1] += size * wave
        x[:, 2] += size * np.abs(np.sin(np.pi * beat * t))
        x[:, 3] += size * np.cos(2 * np.pi * beat * t)
        if activity == 4:
            x[:, 5] += 0.4 * np.sin(4 * np.pi * beat * t)
        if activity == 5:
            x[:, 4] += 0.8 * strength * wave
    return x


def make_data(persons, windows, seed):
    rng = np.random.default_rng(seed)
    xs, ys = [], []
    for _ in range(persons):
        person = {"pace": rng.uniform(0.8, 1.2), "strength": rng.uniform(0.7, 1.3), "angle": rng.uniform(-0.5, 0.5)}
        for activity in rng.choice(len(ACTIVITIES), size=windows, p=SHARE):
            xs.append(record(person, activity, rng))
            ys.append(activity)
    return np.array(xs, dtype=np.float32), np.array(ys)


class ActivityNet(nn.Module):
    def __init__(self, channels=6, width=32, classes=len(ACTIVITIES)):
        super().__init__()
        self.conv = nn.Conv1d(channels, width, kernel_size=5, stride=2, padding=2)
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(torch.randn(1, 33, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 4, dim_feedforward=64, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=1)
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        x = torch.relu(self.conv(x.transpose(1, 2))).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], dim=1) + self.position
        return self.head(self.encoder(x)[:, 0])


class EarlyStopping:
    def __init__(self, patience):
        self.patience, self.best, self.bad, self.state = patience, -np.inf, 0, None

    def step(self, score, model):
        if score > self.best:
            self.best, self.bad = score, 0
            self.state = {k: v.clone() for k, v in model.state_dict().items()}
        else:
            self.bad += 1
        return self.bad >= self.patience


def predict(model, loader):
    model.eval()
    with torch.no_grad():
        return torch.cat([model(x).argmax(dim=1) for x, _ in loader]).numpy()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=14)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--patience", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)

    x_train, y_train = make_data(persons=16, windows=140, seed=1)
    x_val, y_val = make_data(persons=4, windows=120, seed=2)
    x_test, y_test = make_data(persons=6, windows=120, seed=3)
    mean, std = x_train.mean(axis=(0, 1)), x_train.std(axis=(0, 1))
    sets = [
        TensorDataset(torch.from_numpy((x - mean) / std), torch.from_numpy(y))
        for x, y in [(x_train, y_train), (x_val, y_val), (x_test, y_test)]
    ]
    class_weights = 1.0 / np.bincount(y_train)
    sampler = WeightedRandomSampler(class_weights[y_train], num_samples=len(y_train), replacement=True)
    train_loader = DataLoader(sets[0], batch_size=args.batch_size, sampler=sampler)
    val_loader = DataLoader(sets[1], batch_size=256)
    test_loader = DataLoader(sets[2], batch_size=256)

    model = ActivityNet()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=1e-2)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", factor=0.3, patience=1)
    stopper = EarlyStopping(args.patience)

    for epoch in range(args.epochs):
        model.train()
        for x, y in train_loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
        val_f1 = f1_score(y_val, predict(model, val_loader), average="macro")
        scheduler.step(val_f1)
        print(
            f"epoch {epoch + 1}: loss {loss.item():.3f}, val f1 {val_f1:.3f}, lr {optimizer.param_groups[0]['lr']:.5f}"
        )
        if stopper.step(val_f1, model):
            break

    model.load_state_dict(stopper.state)
    test_f1 = f1_score(y_test, predict(model, test_loader), average="macro")
    print(f"FINAL test_f1={test_f1:.4f}")


if __name__ == "__main__":
    main()
