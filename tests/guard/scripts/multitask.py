"""Multi-task learning: digit, its slant and its amount of ink from one trunk; losses weighted by learnt uncertainties."""

import os

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset, random_split

CONFIG = {
    "epochs": 15,
    "batch_size": 48,
    "lr": 0.02,
    "momentum": 0.9,
    "weight_decay": 5e-4,
    "milestones": [10, 13],
    "checkpoint": "checkpoints",
}


class MultiTaskDigits(Dataset):
    def __init__(self):
        data = load_digits()
        self.images = data.images.astype(np.float32) / 16
        self.digit = data.target
        mass = self.images.sum((1, 2))
        rows, cols = np.mgrid[0:8, 0:8].astype(np.float32)
        cx = (self.images * cols).sum((1, 2)) / mass
        cy = (self.images * rows).sum((1, 2)) / mass
        dx, dy = cols[None] - cx[:, None, None], rows[None] - cy[:, None, None]
        slant = (self.images * dx * dy).sum((1, 2)) / (self.images * dy * dy).sum((1, 2))
        self.slant = ((slant - slant.mean()) / slant.std()).astype(np.float32)
        self.ink = ((mass - mass.mean()) / mass.std()).astype(np.float32)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return {
            "image": torch.from_numpy(self.images[i]).unsqueeze(0),
            "digit": int(self.digit[i]),
            "slant": torch.tensor(self.slant[i]),
            "ink": torch.tensor(self.ink[i]),
        }


class MultiTaskNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 24, 3, padding=1),
            nn.BatchNorm2d(24),
            nn.ReLU(),
            nn.Conv2d(24, 48, 3, stride=2, padding=1),
            nn.BatchNorm2d(48),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(48 * 16, 64),
            nn.ReLU(),
        )
        self.head_digit = nn.Linear(64, 10)
        self.head_slant = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))
        self.head_ink = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x):
        z = self.backbone(x)
        return {
            "digit": self.head_digit(z),
            "slant": self.head_slant(z).squeeze(1),
            "ink": self.head_ink(z).squeeze(1),
        }


class UncertaintyLoss(nn.Module):
    """Kendall et al.: exp(-s) * loss + s, with one s per task."""

    def __init__(self):
        super().__init__()
        self.log_vars = nn.Parameter(torch.zeros(3))
        self.ce = nn.CrossEntropyLoss()
        self.mse = nn.MSELoss()

    def forward(self, out, batch):
        losses = [
            self.ce(out["digit"], batch["digit"]),
            self.mse(out["slant"], batch["slant"]),
            self.mse(out["ink"], batch["ink"]),
        ]
        total = 0
        for i, loss in enumerate(losses):
            total = total + torch.exp(-self.log_vars[i]) * loss + 0.5 * self.log_vars[i]
        return total, losses


def validate(model, loader):
    model.eval()
    correct, slant, ink, n = 0, 0.0, 0.0, 0
    with torch.no_grad():
        for batch in loader:
            out = model(batch["image"])
            correct += (out["digit"].argmax(1) == batch["digit"]).sum().item()
            slant += (out["slant"] - batch["slant"]).square().sum().item()
            ink += (out["ink"] - batch["ink"]).square().sum().item()
            n += len(batch["digit"])
    return correct / n, slant / n, ink / n


def main(cfg):
    torch.manual_seed(3)
    os.makedirs(cfg["checkpoint"], exist_ok=True)
    dataset = MultiTaskDigits()
    train_set, val_set = random_split(dataset, [1400, len(dataset) - 1400])
    train_loader = DataLoader(train_set, cfg["batch_size"], shuffle=True)
    val_loader = DataLoader(val_set, cfg["batch_size"])

    model, criterion = MultiTaskNet(), UncertaintyLoss()
    optimizer = torch.optim.SGD(
        [
            {"params": model.parameters(), "weight_decay": cfg["weight_decay"]},
            {"params": criterion.parameters(), "lr": cfg["lr"] * 0.1},
        ],
        lr=cfg["lr"],
        momentum=cfg["momentum"],
    )
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, cfg["milestones"], gamma=0.2)
    best = 0.0
    for epoch in range(cfg["epochs"]):
        model.train()
        running = np.zeros(3)
        for batch in train_loader:
            optimizer.zero_grad()
            out = model(batch["image"])
            loss, parts = criterion(out, batch)
            loss.backward()
            optimizer.step()
            running += [part.item() for part in parts]
        scheduler.step()
        acc, slant, ink = validate(model, val_loader)
        print(
            f"epoch {epoch:2d} train ce/slant/ink {(running / len(train_loader)).round(3)} "
            f"val acc {acc:.4f} slant mse {slant:.4f} ink mse {ink:.4f}"
        )
        if acc > best:
            best = acc
            torch.save(
                {"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict(), "best": best},
                os.path.join(cfg["checkpoint"], "best.pth"),
            )


if __name__ == "__main__":
    main(CONFIG)
