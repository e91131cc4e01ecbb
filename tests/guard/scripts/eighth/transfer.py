"""Transfer learning: a CNN is trained on the digits 0 to 5, then its frozen features serve a new head for 6 to 9 with few samples."""

import torch
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

SEED = 0
torch.manual_seed(SEED)

BASE_CLASSES = [0, 1, 2, 3, 4, 5]
NEW_CLASSES = [6, 7, 8, 9]


def make_model(num_classes):
    model = nn.Sequential()
    model.add_module(
        "features",
        nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
        ),
    )
    model.add_module("fc", nn.Linear(64 * 4 * 4, num_classes))
    return model


def init_weights(m):
    if isinstance(m, (nn.Linear, nn.Conv2d)):
        nn.init.normal_(m.weight, 0, 0.02)
        nn.init.zeros_(m.bias)


def select(classes):
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    keep = torch.isin(labels, torch.tensor(classes))
    mapping = {c: i for i, c in enumerate(classes)}
    return images[keep], torch.tensor([mapping[int(c)] for c in labels[keep]])


def fit(model, optimizer, train_loader, test_loader, epochs):
    criterion = nn.CrossEntropyLoss()
    for epoch in range(epochs):
        model.train()
        total = 0.0
        for images, labels in train_loader:
            optimizer.zero_grad()
            loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(labels)
        acc = accuracy(model, test_loader)
        print(f"epoch {epoch + 1}: loss {total / len(train_loader.dataset):.4f} test acc {acc:.4f}")
    return acc


@torch.no_grad()
def accuracy(model, loader):
    model.eval()
    hits = sum((model(images).argmax(1) == labels).sum().item() for images, labels in loader)
    return hits / len(loader.dataset)


# 1. pretraining
images, labels = select(BASE_CLASSES)
order = torch.randperm(len(labels))
cut = int(0.8 * len(labels))
train_loader = DataLoader(TensorDataset(images[order[:cut]], labels[order[:cut]]), batch_size=32, shuffle=True)
test_loader = DataLoader(TensorDataset(images[order[cut:]], labels[order[cut:]]), batch_size=256)
model = make_model(len(BASE_CLASSES))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
fit(model, optimizer, train_loader, test_loader, epochs=8)
torch.save(model.state_dict(), "base.pt")

# 2. a new head on frozen features
images, labels = select(NEW_CLASSES)
order = torch.randperm(len(labels))
few = 120
train_loader = DataLoader(TensorDataset(images[order[:few]], labels[order[:few]]), batch_size=16, shuffle=True)
test_loader = DataLoader(TensorDataset(images[order[few:]], labels[order[few:]]), batch_size=256)

model = make_model(len(BASE_CLASSES))
model.load_state_dict(torch.load("base.pt"))
for p in model.features.parameters():
    p.requires_grad = False
model.fc = nn.Linear(model.fc.in_features, len(NEW_CLASSES))
model.fc.apply(init_weights)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
acc = fit(model, optimizer, train_loader, test_loader, epochs=25)
print(f"FINAL accuracy={acc:.4f}")
