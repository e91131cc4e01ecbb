"""My first CNN: handwritten digits, dropout and batch norm, the best epoch is kept and tested."""

import copy

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

SEED = 0
torch.manual_seed(SEED)
np.random.seed(SEED)

digits = load_digits()
x = digits.images.astype("float32") / 16.0
y = digits.target
order = np.random.permutation(len(x))
x, y = x[order], y[order]
x_train, y_train = x[:1000], y[:1000]
x_val, y_val = x[1000:1300], y[1000:1300]
x_test, y_test = x[1300:], y[1300:]


def as_loader(images, labels, shuffle):
    data = TensorDataset(torch.tensor(images).unsqueeze(1), torch.tensor(labels))
    return DataLoader(data, batch_size=32, shuffle=shuffle)


train_loader = as_loader(x_train, y_train, True)
val_loader = as_loader(x_val, y_val, False)
test_loader = as_loader(x_test, y_test, False)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(32)
        self.drop = nn.Dropout(0.3)
        self.fc1 = nn.Linear(32 * 2 * 2, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)
        x = x.flatten(1)
        x = self.drop(F.relu(self.fc1(x)))
        return self.fc2(x)


def evaluate(model, loader):
    model.eval()
    correct, total = 0, 0
    with torch.no_grad():
        for images, labels in loader:
            pred = model(images).argmax(1)
            correct += (pred == labels).sum().item()
            total += labels.size(0)
    return correct / total


model = Net()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)

best_acc, best_weights = 0.0, None
for epoch in range(12):
    model.train()
    running_loss = 0.0
    for images, labels in train_loader:
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        running_loss += loss.item()
    scheduler.step()
    val_acc = evaluate(model, val_loader)
    if val_acc > best_acc:
        best_acc = val_acc
        best_weights = copy.deepcopy(model.state_dict())
    print(f"epoch {epoch} loss {running_loss / len(train_loader):.4f} val {val_acc:.3f}")

model.load_state_dict(best_weights)
print(f"FINAL accuracy={evaluate(model, test_loader):.4f}")
