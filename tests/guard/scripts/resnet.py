"""The shape of pytorch-cifar: a residual net with batch norm, SGD, cosine by epochs, augmentation, best checkpoint."""

import os

import torch
import torch.backends.cudnn as cudnn
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

device = "cuda" if torch.cuda.is_available() else "cpu"
cudnn.benchmark = True
best_acc = 0.0


class Digits(Dataset):
    def __init__(self, train):
        x, y = load_digits(return_X_y=True)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(3))
        x = torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8)[order] / 16
        y = torch.tensor(y)[order]
        self.x, self.y = (x[:1440], y[:1440]) if train else (x[1440:], y[1440:])
        self.train = train

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        x = self.x[i]
        if self.train:
            x = F.pad(x, (1, 1, 1, 1))
            a, b = torch.randint(0, 3, (2,)).tolist()
            x = x[:, a : a + 8, b : b + 8]
        return (x - 0.305) / 0.376, self.y[i]


class Block(nn.Module):
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
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.layer1 = Block(8, 8)
        self.layer2 = Block(8, 16, 2)
        self.linear = nn.Linear(16, 10)

    def forward(self, x):
        x = self.layer2(self.layer1(self.stem(x)))
        return self.linear(x.mean((2, 3)))


trainloader = DataLoader(Digits(True), batch_size=32, shuffle=True, num_workers=0)
testloader = DataLoader(Digits(False), batch_size=100, shuffle=False)
net = ResNet().to(device)
criterion = nn.CrossEntropyLoss()
optimizer = optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)


def train(epoch):
    net.train()
    train_loss = correct = total = 0
    for inputs, targets in trainloader:
        inputs, targets = inputs.to(device), targets.to(device)
        optimizer.zero_grad()
        outputs = net(inputs)
        loss = criterion(outputs, targets)
        loss.backward()
        optimizer.step()
        train_loss += loss.item()
        correct += outputs.argmax(1).eq(targets).sum().item()
        total += targets.size(0)
    print(f"epoch {epoch} train loss {train_loss / len(trainloader):.3f} acc {100.0 * correct / total:.2f}%")


def test(epoch):
    global best_acc
    net.eval()
    correct = total = 0
    with torch.no_grad():
        for inputs, targets in testloader:
            inputs, targets = inputs.to(device), targets.to(device)
            outputs = net(inputs)
            correct += outputs.argmax(1).eq(targets).sum().item()
            total += targets.size(0)
    acc = 100.0 * correct / total
    print(f"test acc {acc:.2f}%")
    if acc > best_acc:
        os.makedirs("checkpoint", exist_ok=True)
        torch.save({"net": net.state_dict(), "acc": acc, "epoch": epoch}, "./checkpoint/ckpt.pth")
        best_acc = acc


for epoch in range(20):
    train(epoch)
    test(epoch)
    scheduler.step()
