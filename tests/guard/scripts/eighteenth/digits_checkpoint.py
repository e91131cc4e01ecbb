"""A small CNN on scikit-learn's digits with a validation loop, a plateau schedule and the best checkpoint."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import DataLoader, TensorDataset

SEED = 0
EPOCHS = 12
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Net(nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(32)
        self.fc1 = nn.Linear(32 * 2 * 2, 64)
        self.drop = nn.Dropout(0.25)
        self.fc2 = nn.Linear(64, num_classes)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)
        x = x.flatten(1)
        x = self.drop(F.relu(self.fc1(x)))
        return self.fc2(x)


def get_loaders(batch_size=32):
    digits = load_digits()
    images = digits.images[:, None] / 16.0
    x_train, x_test, y_train, y_test = train_test_split(
        images, digits.target, test_size=0.3, stratify=digits.target, random_state=SEED
    )
    x_val, x_test, y_val, y_test = train_test_split(x_test, y_test, test_size=0.5, stratify=y_test, random_state=SEED)
    mean, std = x_train.mean(), x_train.std()
    x_train = (x_train - mean) / std
    x_val = (x_val - mean) / std
    x_test = (x_test - mean) / std

    def dataset(x, y):
        return TensorDataset(torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.long))

    train = DataLoader(dataset(x_train, y_train), batch_size=batch_size, shuffle=True)
    val = DataLoader(dataset(x_val, y_val), batch_size=128)
    test = DataLoader(dataset(x_test, y_test), batch_size=128)
    return train, val, test


def train_one_epoch(model, loader, criterion, optimizer):
    model.train()
    running = 0.0
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        running += loss.item() * len(labels)
    return running / len(loader.dataset)


@torch.no_grad()
def evaluate(model, loader, criterion):
    model.eval()
    total, correct = 0.0, 0
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        logits = model(images)
        total += criterion(logits, labels).item() * len(labels)
        correct += (logits.argmax(dim=1) == labels).sum().item()
    return total / len(loader.dataset), correct / len(loader.dataset)


def main():
    torch.manual_seed(SEED)
    train_loader, val_loader, test_loader = get_loaders()
    model = Net().to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="min", factor=0.3, patience=1)

    best_loss = float("inf")
    best_state = copy.deepcopy(model.state_dict())
    for epoch in range(EPOCHS):
        train_loss = train_one_epoch(model, train_loader, criterion, optimizer)
        val_loss, val_acc = evaluate(model, val_loader, criterion)
        scheduler.step(val_loss)
        if val_loss < best_loss:
            best_loss = val_loss
            best_state = copy.deepcopy(model.state_dict())
        lr = optimizer.param_groups[0]["lr"]
        print(
            f"epoch {epoch + 1:2d}  train loss {train_loss:.4f}  val loss {val_loss:.4f}  val acc {val_acc:.4f}  lr {lr:.5f}"
        )

    model.load_state_dict(best_state)
    _, test_acc = evaluate(model, test_loader, criterion)
    print(f"FINAL test_acc={test_acc:.4f}")


if __name__ == "__main__":
    main()
