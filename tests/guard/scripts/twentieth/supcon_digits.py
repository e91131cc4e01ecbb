"""Supervised contrastive learning in two stages, after SupContrast: an encoder on two crops, then a linear classifier."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms


def parse_option():
    parser = argparse.ArgumentParser("argument for training")
    parser.add_argument("--batch_size", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--linear_epochs", type=int, default=6)
    parser.add_argument("--learning_rate", type=float, default=0.1)
    parser.add_argument("--linear_rate", type=float, default=0.5)
    parser.add_argument("--weight_decay", type=float, default=1e-4)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--temp", type=float, default=0.1, help="temperature for loss function")
    parser.add_argument("--method", choices=["SupCon", "SimCLR"], default="SupCon")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


class TwoCropTransform:
    """Create two crops of the same image"""

    def __init__(self, transform):
        self.transform = transform

    def __call__(self, x):
        return [self.transform(x), self.transform(x)]


class Digits(Dataset):
    def __init__(self, images, labels, transform):
        self.images = torch.tensor(images, dtype=torch.float32).unsqueeze(1) / 16.0
        self.labels, self.transform = torch.tensor(labels), transform

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.transform(self.images[i]), self.labels[i]


def set_loader(opt):
    normalize = transforms.Normalize(mean=(0.3053,), std=(0.3760,))
    augment = transforms.Compose(
        [
            transforms.RandomAffine(10, translate=(0.12, 0.12), scale=(0.9, 1.1)),
            transforms.RandomErasing(p=0.3, scale=(0.03, 0.12)),
            normalize,
        ]
    )
    digits = load_digits()
    images, labels = digits.images, digits.target
    train = Digits(images[:1200], labels[:1200], TwoCropTransform(augment))
    linear = Digits(images[:1200], labels[:1200], normalize)
    val = Digits(images[1200:], labels[1200:], normalize)
    return (
        DataLoader(train, batch_size=opt.batch_size, shuffle=True, drop_last=True),
        DataLoader(linear, batch_size=opt.batch_size, shuffle=True),
        DataLoader(val, batch_size=256, shuffle=False),
    )


class SupConNet(nn.Module):
    """encoder + projection head"""

    def __init__(self, dim_in=64, feat_dim=32):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1, stride=2, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, dim_in, 3, padding=1, stride=2, bias=False),
            nn.BatchNorm2d(dim_in),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.head = nn.Sequential(nn.Linear(dim_in, dim_in), nn.ReLU(inplace=True), nn.Linear(dim_in, feat_dim))

    def forward(self, x):
        return F.normalize(self.head(self.encoder(x)), dim=1)


class LinearClassifier(nn.Module):
    def __init__(self, dim_in=64, num_classes=10):
        super().__init__()
        self.fc = nn.Linear(dim_in, num_classes)

    def forward(self, features):
        return self.fc(features)


class SupConLoss(nn.Module):
    """Supervised Contrastive Learning: https://arxiv.org/pdf/2004.11362.pdf. Without labels it is SimCLR's loss."""

    def __init__(self, temperature=0.07):
        super().__init__()
        self.temperature = temperature

    def forward(self, features, labels=None):
        batch_size, contrast_count = features.shape[:2]
        if labels is None:
            mask = torch.eye(batch_size)
        else:
            labels = labels.contiguous().view(-1, 1)
            mask = torch.eq(labels, labels.T).float()
        contrast_feature = torch.cat(torch.unbind(features, dim=1), dim=0)

        # compute logits
        anchor_dot_contrast = torch.div(torch.matmul(contrast_feature, contrast_feature.T), self.temperature)
        # for numerical stability
        logits_max, _ = torch.max(anchor_dot_contrast, dim=1, keepdim=True)
        logits = anchor_dot_contrast - logits_max.detach()

        # tile mask
        mask = mask.repeat(contrast_count, contrast_count)
        # mask-out self-contrast cases
        logits_mask = 1 - torch.eye(batch_size * contrast_count)
        mask = mask * logits_mask

        # compute log_prob
        exp_logits = torch.exp(logits) * logits_mask
        log_prob = logits - torch.log(exp_logits.sum(1, keepdim=True))
        # compute mean of log-likelihood over positive
        mean_log_prob_pos = (mask * log_prob).sum(1) / mask.sum(1)
        return -mean_log_prob_pos.mean()


def adjust_learning_rate(args, optimizer, base, epoch, epochs):
    lr = base * 0.5 * (1 + torch.cos(torch.tensor(torch.pi * epoch / epochs)).item())
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr


def train(train_loader, model, criterion, optimizer, opt):
    model.train()
    total = 0.0
    for images, labels in train_loader:
        images = torch.cat([images[0], images[1]], dim=0)
        bsz = labels.shape[0]
        features = model(images)
        f1, f2 = torch.split(features, [bsz, bsz], dim=0)
        features = torch.cat([f1.unsqueeze(1), f2.unsqueeze(1)], dim=1)
        loss = criterion(features, labels) if opt.method == "SupCon" else criterion(features)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total / len(train_loader)


def train_linear(train_loader, model, classifier, criterion, optimizer):
    model.eval()
    classifier.train()
    total = 0.0
    for images, labels in train_loader:
        with torch.no_grad():
            features = model.encoder(images)
        output = classifier(features.detach())
        loss = criterion(output, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total / len(train_loader)


def validate(val_loader, model, classifier):
    model.eval()
    classifier.eval()
    right, count = 0, 0
    with torch.no_grad():
        for images, labels in val_loader:
            output = classifier(model.encoder(images))
            right += (output.argmax(1) == labels).sum().item()
            count += len(labels)
    return right / count


def main():
    opt = parse_option()
    torch.manual_seed(opt.seed)
    train_loader, linear_loader, val_loader = set_loader(opt)

    model = SupConNet()
    criterion = SupConLoss(temperature=opt.temp)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=opt.learning_rate, momentum=opt.momentum, weight_decay=opt.weight_decay
    )
    for epoch in range(opt.epochs):
        adjust_learning_rate(opt, optimizer, opt.learning_rate, epoch, opt.epochs)
        loss = train(train_loader, model, criterion, optimizer, opt)
        print(f"epoch {epoch + 1}, contrastive loss {loss:.3f}")

    classifier = LinearClassifier()
    linear_criterion = nn.CrossEntropyLoss()
    linear_optimizer = torch.optim.SGD(classifier.parameters(), lr=opt.linear_rate, momentum=opt.momentum)
    best_acc = 0.0
    for epoch in range(opt.linear_epochs):
        adjust_learning_rate(opt, linear_optimizer, opt.linear_rate, epoch, opt.linear_epochs)
        loss = train_linear(linear_loader, model, classifier, linear_criterion, linear_optimizer)
        acc = validate(val_loader, model, classifier)
        best_acc = max(acc, best_acc)
        print(f"linear epoch {epoch + 1}, loss {loss:.3f}, accuracy {acc:.4f}")
    print(f"best accuracy: {best_acc:.4f}")
    print(f"FINAL accuracy={acc:.4f}")


if __name__ == "__main__":
    main()
