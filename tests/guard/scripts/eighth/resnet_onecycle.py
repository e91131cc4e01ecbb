"""A small ResNet on digits: random shifts and rotations, Normalize, SGD with momentum, OneCycleLR stepped after every batch."""

import torch
import torch.nn as nn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

SEED = 0
torch.manual_seed(SEED)

EPOCHS = 7
BATCH_SIZE = 64
MAX_LR = 0.1

train_transform = transforms.Compose(
    [
        transforms.RandomAffine(degrees=10, translate=(0.1, 0.1)),
        transforms.Normalize((0.3,), (0.37,)),
    ]
)
test_transform = transforms.Compose(
    [
        transforms.Normalize((0.3,), (0.37,)),
    ]
)


class Digits(Dataset):
    def __init__(self, images, labels, transform=None):
        self.images = torch.tensor(images, dtype=torch.float32).unsqueeze(1) / 16
        self.labels = torch.tensor(labels)
        self.transform = transform

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        image = self.images[i]
        if self.transform:
            image = self.transform(image)
        return image, self.labels[i]


class BasicBlock(nn.Module):
    def __init__(self, cin, cout, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(cin, cout, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(cout)
        self.conv2 = nn.Conv2d(cout, cout, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(cout)
        self.shortcut = nn.Sequential()
        if stride != 1 or cin != cout:
            self.shortcut = nn.Sequential(nn.Conv2d(cin, cout, 1, stride, bias=False), nn.BatchNorm2d(cout))

    def forward(self, x):
        out = torch.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out = out + self.shortcut(x)
        return torch.relu(out)


class ResNet(nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.layers = nn.Sequential(BasicBlock(16, 16), BasicBlock(16, 32, 2), BasicBlock(32, 48, 2))
        self.fc = nn.Linear(48, num_classes)

    def forward(self, x):
        x = self.layers(self.stem(x))
        return self.fc(x.mean(dim=(2, 3)))


digits = load_digits()
X_train, X_test, y_train, y_test = train_test_split(
    digits.images, digits.target, test_size=0.3, random_state=SEED, stratify=digits.target
)
train_loader = DataLoader(
    Digits(X_train, y_train, train_transform), batch_size=BATCH_SIZE, shuffle=True, drop_last=True
)
test_loader = DataLoader(Digits(X_test, y_test, test_transform), batch_size=128)

model = ResNet()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=MAX_LR, momentum=0.9, weight_decay=5e-4)
scheduler = torch.optim.lr_scheduler.OneCycleLR(
    optimizer, max_lr=MAX_LR, epochs=EPOCHS, steps_per_epoch=len(train_loader)
)


def evaluate():
    model.eval()
    correct = 0
    with torch.no_grad():
        for images, labels in test_loader:
            correct += (model(images).argmax(1) == labels).sum().item()
    return correct / len(test_loader.dataset)


for epoch in range(EPOCHS):
    model.train()
    running = 0.0
    for images, labels in train_loader:
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        scheduler.step()
        running += loss.item()
    acc = evaluate()
    print(
        f"[{epoch + 1}/{EPOCHS}] loss {running / len(train_loader):.3f} acc {acc:.4f} lr {scheduler.get_last_lr()[0]:.4f}"
    )

print(f"FINAL accuracy={acc:.4f}")
