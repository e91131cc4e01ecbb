"""Which shapes are in the picture? Several labels for each picture, BCEWithLogitsLoss with pos_weight, F1 over the classes."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, random_split

SEED = 0
CLASSES = ["disc", "frame", "cross", "bar", "grid"]
RATES = [0.4, 0.25, 0.2, 0.3, 0.1]
torch.manual_seed(SEED)


def draw(name, picture, rng):
    size = picture.shape[0]
    r, c, s = *rng.integers(5, size - 5, size=2), int(rng.integers(3, 6))
    yy, xx = np.mgrid[:size, :size]
    box = (abs(yy - r) <= s) & (abs(xx - c) <= s)
    mask = {
        "disc": (yy - r) ** 2 + (xx - c) ** 2 <= s * s,
        "frame": box & ((abs(yy - r) == s) | (abs(xx - c) == s)),
        "cross": box & (abs(abs(yy - r) - abs(xx - c)) <= 0),
        "bar": (abs(yy - r) <= 1) & (abs(xx - c) <= s + 2),
        "grid": box & ((yy - r) % 2 == 0) & ((xx - c) % 2 == 0),
    }[name]
    picture[mask] = rng.integers(150, 256)


class ShapesDataset(Dataset):
    def __init__(self, n, seed=0):
        rng = np.random.default_rng(seed)
        self.images = np.zeros((n, 28, 28), dtype=np.uint8)
        self.tags = []
        for i in range(n):
            present = [name for name, rate in zip(CLASSES, RATES) if rng.random() < rate]
            for name in present:
                draw(name, self.images[i], rng)
            noisy = self.images[i] + rng.normal(20, 15, size=(28, 28))
            self.images[i] = noisy.clip(0, 255).astype(np.uint8)
            self.tags.append(present)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, idx):
        image = torch.from_numpy(self.images[idx]).float().unsqueeze(0) / 255.0
        target = torch.zeros(len(CLASSES))
        for name in self.tags[idx]:
            target[CLASSES.index(name)] = 1.0
        return image, target


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveMaxPool2d(1),
        )  # fmt: skip
        self.fc = nn.Linear(32, len(CLASSES))

    def forward(self, x):
        x = self.conv(x).flatten(1)
        return self.fc(x)


def macro_f1(model, loader):
    model.eval()
    tp = fp = fn = torch.zeros(len(CLASSES))
    with torch.no_grad():
        for x, y in loader:
            pred = (torch.sigmoid(model(x)) > 0.5).float()
            tp = tp + (pred * y).sum(0)
            fp = fp + (pred * (1 - y)).sum(0)
            fn = fn + ((1 - pred) * y).sum(0)
    return (2 * tp / (2 * tp + fp + fn).clamp(min=1)).mean().item()


dataset = ShapesDataset(2000)
train_set, test_set = random_split(dataset, [1600, 400], generator=torch.Generator().manual_seed(1))
train_loader = DataLoader(train_set, batch_size=50, shuffle=True)
test_loader = DataLoader(test_set, batch_size=100)

counts = torch.stack([y for _, y in train_set]).sum(0)
pos_weight = (len(train_set) - counts) / counts
model = Net()
criterion = nn.BCEWithLogitsLoss(pos_weight=pos_weight)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)

for epoch in range(8):
    model.train()
    for x, y in train_loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
    scheduler.step()
    print(f"epoch {epoch + 1}: loss {loss.item():.4f}, f1 {macro_f1(model, test_loader):.4f}")
print(f"FINAL macro_f1={macro_f1(model, test_loader):.4f}")
