"""The next eight brightness values along a row of a photograph from the 32 before: a GRU that is fed by windows (scikit-learn's flower.jpg)."""

import numpy as np
import torch
from sklearn.datasets import load_sample_image
from torch import nn
from torch.utils.data import DataLoader, Dataset

import trainworthy

SEED = 0
PAST, AHEAD = 32, 8


class Windows(Dataset):
    def __init__(self, rows, mean, std, stride):
        self.rows = (rows - mean) / std
        self.starts = [(r, s) for r in range(len(rows)) for s in range(0, rows.shape[1] - PAST - AHEAD + 1, stride)]

    def __len__(self):
        return len(self.starts)

    def __getitem__(self, i):
        r, s = self.starts[i]
        past = self.rows[r, s : s + PAST]
        future = self.rows[r, s + PAST : s + PAST + AHEAD]
        return {"past": torch.from_numpy(past).unsqueeze(1), "future": torch.from_numpy(future)}


photo = load_sample_image("flower.jpg").mean(2).astype(np.float32)
upper, lower = photo[0:300:6], photo[310:420:6]  # rows with a gap between the halves
mean, std = upper.mean(), upper.std()
train_set, val_set = Windows(upper, mean, std, 12), Windows(lower, mean, std, 16)


class Forecaster(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.gru = nn.GRU(1, hidden, batch_first=True)
        self.head = nn.Linear(hidden, AHEAD)

    def forward(self, past):
        states, _ = self.gru(past)
        return past[:, -1] + self.head(states[:, -1])  # change since the last value


def train_epoch(model, optimizer, loader):
    model.train()
    for batch in loader:
        loss = nn.functional.smooth_l1_loss(model(batch["past"]), batch["future"])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def mae(model, loader):
    """Mean absolute error in grey levels (0 to 255)."""
    model.eval()
    errors = []
    with torch.no_grad():
        for batch in loader:
            errors.append((model(batch["past"]) - batch["future"]).abs().mean(1))
    return torch.cat(errors).mean().item() * float(std)


def make_script():
    model = Forecaster()
    return trainworthy.Script(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),
        train=train_set,
        val=val_set,
        batch_size=64,
        target="future",
        loss=lambda model, batch: nn.functional.smooth_l1_loss(model(batch["past"]), batch["future"]),
        metric=mae,
        higher_is_better=False,
        floor=float(np.abs(lower - np.median(upper)).mean()),
        train_loop=train_epoch,
    )


def main():
    torch.manual_seed(SEED)
    model = Forecaster()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    train_loader, val_loader = DataLoader(train_set, 64, shuffle=True), DataLoader(val_set, 256)
    for epoch in range(12):
        train_epoch(model, optimizer, train_loader)
        if epoch % 4 == 3:
            print(epoch + 1, mae(model, val_loader))
    print(f"FINAL mae={mae(model, val_loader):.4f}")


if __name__ == "__main__":
    main()
