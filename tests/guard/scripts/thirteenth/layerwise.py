"""Fine-tuning: a small ResNet learns the digits 0 to 5, then all ten at rates that fall layer by layer; its batch norm stays frozen."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset


class Residual(nn.Module):
    def __init__(self, cin, cout, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(cin, cout, 3, stride, 1, bias=False), nn.BatchNorm2d(cout)
        self.conv2, self.bn2 = nn.Conv2d(cout, cout, 3, 1, 1, bias=False), nn.BatchNorm2d(cout)
        self.skip = nn.Conv2d(cin, cout, 1, stride, bias=False) if (cin, stride) != (cout, 1) else nn.Identity()

    def forward(self, x):
        return F.relu(self.skip(x) + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.stage1, self.stage2, self.stage3 = Residual(16, 16, 1), Residual(16, 32, 2), Residual(32, 64, 2)
        self.head = nn.Linear(64, classes)

    def forward(self, x):
        return self.head(self.stage3(self.stage2(self.stage1(self.stem(x)))).mean((2, 3)))


def freeze_bn(model):
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.eval()
            m.weight.requires_grad_(False)
            m.bias.requires_grad_(False)


def evaluate(model, loader):
    model.eval()
    correct = 0
    with torch.no_grad():
        for x, y in loader:
            correct += (model(x).argmax(1) == y).sum().item()
    return correct / len(loader.dataset)


def pretrain(x, y):
    keep = y < 6
    loader = DataLoader(TensorDataset(x[keep], y[keep]), batch_size=64, shuffle=True)
    model = Net(6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(3):
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
    return model.state_dict()


def main():
    torch.manual_seed(0)
    data = load_digits()
    x, y = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16, torch.tensor(data.target)
    order = torch.randperm(len(x))
    base, tune, test = order[:700], order[700:1300], order[1300:]
    weights = pretrain(x[base], y[base])

    model = Net(10)
    missing = model.load_state_dict({k: v for k, v in weights.items() if not k.startswith("head.")}, strict=False)
    assert all(k.startswith("head.") for k in missing.missing_keys)
    freeze_bn(model)
    rate, decay = 3e-3, 0.6
    layers = [model.stem, model.stage1, model.stage2, model.stage3, model.head]
    groups = [
        {"params": [p for p in layer.parameters() if p.requires_grad], "lr": rate * decay ** (len(layers) - 1 - i)}
        for i, layer in enumerate(layers)
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.01)
    train_loader = DataLoader(TensorDataset(x[tune], y[tune]), batch_size=32, shuffle=True)
    test_loader = DataLoader(TensorDataset(x[test], y[test]), batch_size=256)
    epochs = 8
    total, warmup = epochs * len(train_loader), len(train_loader)

    def factor(step):
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    for epoch in range(epochs):
        model.train()
        freeze_bn(model)
        for images, labels in train_loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
            loss.backward()
            optimizer.step()
            scheduler.step()
        print(f"epoch {epoch}: loss {loss.item():.3f} accuracy {evaluate(model, test_loader):.4f}")
    print(f"FINAL accuracy={evaluate(model, test_loader):.4f}")


if __name__ == "__main__":
    main()
