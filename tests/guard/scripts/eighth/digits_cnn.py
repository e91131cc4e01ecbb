"""Digits with a small CNN: own Dataset, Adam, StepLR, accuracy on the test set after every epoch."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import DataLoader, Dataset


class DigitsDataset(Dataset):
    def __init__(self, images, labels):
        self.images = images
        self.labels = labels

    def __len__(self):
        return len(self.images)

    def __getitem__(self, idx):
        image = torch.tensor(self.images[idx], dtype=torch.float32).unsqueeze(0) / 16.0
        return image, int(self.labels[idx])


class Net(nn.Module):
    def __init__(self, n_blocks=3):
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, padding=1)
        self.blocks = nn.ModuleList([nn.Conv2d(16, 16, 3, padding=1) for _ in range(n_blocks)])
        self.fc1 = nn.Linear(16 * 4 * 4, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = F.relu(self.stem(x))
        for block in self.blocks:
            x = F.relu(block(x))
        x = F.max_pool2d(x, 2).flatten(1)
        x = F.relu(self.fc1(x))
        x = self.fc2(x)
        return x


def train(model, loader, optimizer, epoch):
    model.train()
    total = 0.0
    for data, target in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()
        total += loss.item()
    print(f"Train epoch {epoch}: loss {total / len(loader):.4f}")


def test(model, loader):
    model.eval()
    loss, correct = 0.0, 0
    with torch.no_grad():
        for data, target in loader:
            output = model(data)
            loss += F.cross_entropy(output, target, reduction="sum").item()
            correct += (output.argmax(dim=1) == target).sum().item()
    n = len(loader.dataset)
    print(f"Test: average loss {loss / n:.4f}, accuracy {correct}/{n}")
    return correct / n


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--gamma", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    digits = load_digits()
    x_train, x_test, y_train, y_test = train_test_split(
        digits.images, digits.target, test_size=0.3, random_state=args.seed, stratify=digits.target
    )
    train_loader = DataLoader(DigitsDataset(x_train, y_train), batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(DigitsDataset(x_test, y_test), batch_size=256)

    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=args.gamma)
    for epoch in range(1, args.epochs + 1):
        train(model, train_loader, optimizer, epoch)
        accuracy = test(model, test_loader)
        scheduler.step()
    print(f"FINAL accuracy={accuracy:.4f}")


if __name__ == "__main__":
    main()
