"""Transfer learning: a backbone is pretrained on the digits 0 to 5, saved, loaded and fine-tuned on few pictures of 6 to 9."""

import os

import torch
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

CHECKPOINT = "backbone.pt"


class SmallResNet(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU())
        self.block = nn.Sequential(
            nn.Conv2d(24, 24, 3, padding=1),
            nn.BatchNorm2d(24),
            nn.ReLU(),
            nn.Conv2d(24, 24, 3, padding=1),
            nn.BatchNorm2d(24),
        )
        self.down = nn.Sequential(nn.Conv2d(24, 48, 3, stride=2, padding=1), nn.BatchNorm2d(48), nn.ReLU())
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.fc = nn.Linear(48 * 4, num_classes)

    def forward(self, x):
        x = self.stem(x)
        x = torch.relu(x + self.block(x))
        x = self.pool(self.down(x)).flatten(1)
        return self.fc(x)


def load_data():
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1)
    images = images / 16.0
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))
    images, labels = images[order], labels[order]
    source, target = labels < 6, labels >= 6
    base = TensorDataset(images[source], labels[source])
    x, y = images[target], labels[target] - 6
    return base, TensorDataset(x[:40], y[:40]), TensorDataset(x[40:], y[40:])


def fit(model, loader, optimizer, epochs, scheduler=None):
    criterion = nn.CrossEntropyLoss()
    for epoch in range(epochs):
        model.train()
        total, seen = 0.0, 0
        for images, labels in loader:
            optimizer.zero_grad()
            loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(labels)
            seen += len(labels)
        if scheduler is not None:
            scheduler.step()
        print(f"  epoch {epoch + 1}: loss {total / seen:.4f}")


def accuracy(model, loader):
    model.eval()
    with torch.no_grad():
        return sum((model(x).argmax(1) == y).sum().item() for x, y in loader) / len(loader.dataset)


def pretrain(base):
    model = SmallResNet(num_classes=6)
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    fit(model, DataLoader(base, batch_size=64, shuffle=True), optimizer, epochs=6)
    torch.save({"model": model.state_dict()}, CHECKPOINT)


def main():
    torch.manual_seed(0)
    base, train_set, test_set = load_data()
    print("pretraining")
    pretrain(base)

    train_loader = DataLoader(train_set, batch_size=8, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=128)
    model = SmallResNet(num_classes=6)
    model.load_state_dict(torch.load(CHECKPOINT)["model"])
    os.remove(CHECKPOINT)

    print("training the head")
    for p in model.parameters():
        p.requires_grad = False
    model.fc = nn.Linear(model.fc.in_features, 4)
    optimizer = optim.Adam(model.fc.parameters(), lr=5e-3)
    fit(model, train_loader, optimizer, epochs=3)
    print(f"test accuracy with a frozen backbone: {accuracy(model, test_loader):.3f}")

    print("fine-tuning")
    for p in model.parameters():
        p.requires_grad = True
    backbone = [p for n, p in model.named_parameters() if not n.startswith("fc.")]
    optimizer = optim.AdamW([{"params": backbone, "lr": 3e-4}, {"params": model.fc.parameters(), "lr": 3e-3}])
    scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
    fit(model, train_loader, optimizer, epochs=8, scheduler=scheduler)
    print(f"FINAL test_acc={accuracy(model, test_loader):.4f}")


if __name__ == "__main__":
    main()
