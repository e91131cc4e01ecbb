"""Change detection: two pictures of the same ground, the network marks what is new in the second."""

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
rng = np.random.default_rng(0)
SIZE = 24


def block(image, mask=None):
    h, w = rng.integers(4, 9, 2)
    y, x = rng.integers(0, SIZE - h), rng.integers(0, SIZE - w)
    image[:, y : y + h, x : x + w] = rng.uniform(0.1, 0.9, (3, 1, 1))
    if mask is not None:
        mask[y : y + h, x : x + w] = 1


def scene():
    ground = np.full((3, SIZE, SIZE), 0.4) + rng.uniform(-0.2, 0.2, (3, 1, 1))
    for _ in range(3):
        block(ground)
    later, mask = ground.copy(), np.zeros((SIZE, SIZE))
    block(later, mask)
    light = rng.uniform(0.85, 1.15)
    before = ground + 0.04 * rng.standard_normal(ground.shape)
    after = later * light + 0.04 * rng.standard_normal(ground.shape)
    return before, after, mask


def make(n):
    before, after, mask = zip(*(scene() for _ in range(n)))
    return [torch.tensor(np.stack(part), dtype=torch.float32) for part in (before, after, mask)]


class Encoder(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.one = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.two = nn.Sequential(nn.Conv2d(width, width * 2, 3, padding=1), nn.BatchNorm2d(width * 2), nn.ReLU())

    def forward(self, x):
        fine = self.one(x)
        coarse = self.two(F.max_pool2d(fine, 2))
        return fine, coarse


class ChangeNet(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.encoder = Encoder(width)
        self.merge = nn.Sequential(nn.Conv2d(width * 3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, before, after):
        fine_a, coarse_a = self.encoder(before)
        fine_b, coarse_b = self.encoder(after)
        coarse = F.interpolate((coarse_a - coarse_b).abs(), scale_factor=2, mode="bilinear", align_corners=False)
        merged = self.merge(torch.cat([(fine_a - fine_b).abs(), coarse], dim=1))
        return self.head(merged).squeeze(1)


def dice_loss(logits, mask, eps=1.0):
    p = torch.sigmoid(logits)
    overlap = (p * mask).sum(dim=(1, 2))
    return 1 - ((2 * overlap + eps) / (p.sum(dim=(1, 2)) + mask.sum(dim=(1, 2)) + eps)).mean()


def iou(model, before, after, mask):
    model.eval()
    with torch.no_grad():
        predicted = torch.sigmoid(model(before, after)) > 0.5
    mask = mask.bool()
    return ((predicted & mask).sum() / (predicted | mask).sum()).item()


train, test = make(400), make(100)
mean, std = train[0].mean(dim=(0, 2, 3), keepdim=True), train[0].std(dim=(0, 2, 3), keepdim=True)
train[0], train[1] = (train[0] - mean) / std, (train[1] - mean) / std
test[0], test[1] = (test[0] - mean) / std, (test[1] - mean) / std

model = ChangeNet()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-4)
for epoch in range(8):
    model.train()
    order = torch.randperm(len(train[0]))
    for batch in order.split(20):
        before, after, mask = train[0][batch], train[1][batch], train[2][batch]
        if torch.rand(1) < 0.5:
            before, after, mask = before.flip(-1), after.flip(-1), mask.flip(-1)
        logits = model(before, after)
        loss = F.binary_cross_entropy_with_logits(logits, mask) + dice_loss(logits, mask)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss.item():.3f}")
print(f"FINAL iou={iou(model, *test):.3f}")
