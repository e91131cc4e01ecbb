"""House numbers of four digits: one CNN, one classifier for each place, cross entropy summed over the places."""

import numpy as np
import torch
import torch.nn as nn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import DataLoader, Dataset

SEED = 0
PLACES = 4
torch.manual_seed(SEED)


class HouseNumbers(Dataset):
    """Numbers put together from single digits. Train and test draw from different digits."""

    def __init__(self, digits, labels, size, seed, augment=False):
        rng = np.random.default_rng(seed)
        self.rows = rng.integers(len(digits), size=(size, PLACES))
        self.digits, self.labels, self.augment = digits, labels, augment

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        row = self.rows[i]
        picture = np.concatenate([self.digits[j] for j in row], axis=1)
        picture = torch.tensor(picture, dtype=torch.float32).unsqueeze(0) / 16.0
        if self.augment:
            picture = picture + 0.1 * torch.randn_like(picture)
        return picture, torch.tensor(self.labels[row])


class Reader(nn.Module):
    def __init__(self, n_classes=10):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(24, 48, 3, padding=1), nn.BatchNorm2d(48), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        self.dropout = nn.Dropout(0.2)
        self.heads = nn.ModuleList([nn.Linear(48 * 2 * 2, n_classes) for _ in range(PLACES)])

    def forward(self, x):
        f = self.features(x)  # N, 48, 2, 8
        columns = f.permute(0, 3, 1, 2).reshape(len(x), PLACES, -1)
        columns = self.dropout(columns)
        return [head(columns[:, k]) for k, head in enumerate(self.heads)]


data = load_digits()
d_train, d_test, l_train, l_test = train_test_split(
    data.images, data.target, test_size=0.25, random_state=1, stratify=data.target
)
train_loader = DataLoader(HouseNumbers(d_train, l_train, 2400, 1, augment=True), batch_size=64, shuffle=True)
test_loader = DataLoader(HouseNumbers(d_test, l_test, 800, 2), batch_size=250)

model = Reader()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)


def evaluate():
    """Share of numbers with all four digits right."""
    model.eval()
    right = total = 0
    with torch.no_grad():
        for pictures, numbers in test_loader:
            predicted = torch.stack([logits.argmax(dim=1) for logits in model(pictures)], dim=1)
            right += (predicted == numbers).all(dim=1).sum().item()
            total += len(numbers)
    return right / total


for epoch in range(6):
    model.train()
    running = 0.0
    for pictures, numbers in train_loader:
        optimizer.zero_grad()
        loss = 0
        for k, logits in enumerate(model(pictures)):
            loss = loss + criterion(logits, numbers[:, k])
        loss.backward()
        optimizer.step()
        running += loss.item()
    print(f"epoch {epoch + 1}: loss {running / len(train_loader):.4f}, whole numbers right {evaluate():.3f}")

print(f"FINAL sequence_acc={evaluate():.4f}")
