"""Counting cells in small pictures: a network predicts a density map, its sum is the count."""

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(0)
rng = np.random.default_rng(0)
SIZE = 32
DENSITY_SCALE = 100.0


def draw(n_cells):
    yy, xx = np.mgrid[0:SIZE, 0:SIZE]
    image = 40 + 8 * rng.standard_normal((SIZE, SIZE))
    points = rng.uniform(3, SIZE - 3, (n_cells, 2))
    for y, x in points:
        radius = rng.uniform(1.0, 1.8)
        image += 110 * np.exp(-((yy - y) ** 2 + (xx - x) ** 2) / (2 * radius**2))
    return np.clip(image, 0, 255).astype(np.uint8), points


def density_map(points):
    yy, xx = np.mgrid[0:SIZE, 0:SIZE]
    density = np.zeros((SIZE, SIZE), dtype=np.float32)
    for y, x in points:
        bump = np.exp(-((yy - y) ** 2 + (xx - x) ** 2) / (2 * 1.5**2))
        density += bump / bump.sum()
    return density


class Cells(Dataset):
    def __init__(self, n, augment):
        self.samples = [draw(rng.integers(1, 16)) for _ in range(n)]
        self.augment = augment

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        image, points = self.samples[index]
        density = density_map(points)
        image = image.astype(np.float32) / 255.0
        if self.augment and np.random.rand() < 0.5:
            image = image[:, ::-1].copy()
            density = density[:, ::-1].copy()
        return torch.from_numpy(image)[None], torch.from_numpy(density)[None] * DENSITY_SCALE, float(len(points))


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 5, padding=2),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 1, 1),
        )

    def forward(self, x):
        return self.net(x)


train_loader = DataLoader(Cells(400, augment=True), batch_size=16, shuffle=True)
val_loader = DataLoader(Cells(100, augment=False), batch_size=50)
model = Counter()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)
criterion = nn.MSELoss()


def mean_absolute_error():
    model.eval()
    errors = []
    with torch.no_grad():
        for image, _, count in val_loader:
            predicted = model(image).sum(dim=(1, 2, 3)) / DENSITY_SCALE
            errors.append((predicted - count).abs())
    return torch.cat(errors).mean().item()


for epoch in range(12):
    model.train()
    total = 0.0
    for image, density, _ in train_loader:
        optimizer.zero_grad()
        loss = criterion(model(image), density)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(image)
    scheduler.step()
    print(f"epoch {epoch + 1}: loss {total / 400:.4f}")

print(f"FINAL mae={mean_absolute_error():.3f}")
