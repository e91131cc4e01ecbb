"""Siamese network with the contrastive loss of Hadsell et al. on sklearn's digits: are two pictures the same digit?"""

import argparse
import random

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from torch import nn, optim
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset


class SiameseDigits(Dataset):
    """Half of the pairs are of one class. Label 0: same, 1: different."""

    def __init__(self, images, labels, fixed=False):
        self.images, self.labels = images, labels
        self.by_class = {c: np.flatnonzero(labels == c) for c in range(10)}
        self.fixed = fixed

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        rng = random.Random(i) if self.fixed else random
        c = int(self.labels[i])
        same = rng.random() < 0.5
        other = c if same else rng.choice([k for k in range(10) if k != c])
        j = rng.choice(list(self.by_class[other]))
        label = 0.0 if same else 1.0
        return torch.from_numpy(self.images[i]), torch.from_numpy(self.images[j]), torch.tensor(label)


class SiameseNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.cnn = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.BatchNorm2d(16),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.BatchNorm2d(32),
            nn.MaxPool2d(2),
        )
        self.fc = nn.Sequential(nn.Linear(32 * 16, 64), nn.ReLU(), nn.Linear(64, 16))

    def forward_once(self, x):
        output = self.cnn(x)
        output = output.view(output.size()[0], -1)
        return self.fc(output)

    def forward(self, input1, input2):
        output1 = self.forward_once(input1)
        output2 = self.forward_once(input2)
        return output1, output2


class ContrastiveLoss(nn.Module):
    def __init__(self, margin=2.0):
        super().__init__()
        self.margin = margin

    def forward(self, output1, output2, label):
        euclidean_distance = F.pairwise_distance(output1, output2)
        loss_contrastive = torch.mean(
            (1 - label) * torch.pow(euclidean_distance, 2)
            + label * torch.pow(torch.clamp(self.margin - euclidean_distance, min=0.0), 2)
        )
        return loss_contrastive


def test(model, loader):
    model.eval()
    distances, labels = [], []
    with torch.no_grad():
        for a, b, label in loader:
            x, y = model(a, b)
            distances.append(F.pairwise_distance(x, y))
            labels.append(label)
    return roc_auc_score(torch.cat(labels), torch.cat(distances))


def main():
    parser = argparse.ArgumentParser(description="siamese digits")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--gamma", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    random.seed(args.seed)

    digits = load_digits()
    images = (digits.images / 16.0).astype(np.float32)[:, None]
    order = np.random.RandomState(0).permutation(len(images))
    train, held = order[:1400], order[1400:]
    train_loader = DataLoader(SiameseDigits(images[train], digits.target[train]), args.batch_size, shuffle=True)
    test_loader = DataLoader(SiameseDigits(images[held], digits.target[held], fixed=True), 128)

    model = SiameseNetwork()
    criterion = ContrastiveLoss()
    optimizer = optim.Adam(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    for epoch in range(1, args.epochs + 1):
        model.train()
        for batch_idx, (a, b, label) in enumerate(train_loader):
            optimizer.zero_grad()
            output1, output2 = model(a, b)
            loss = criterion(output1, output2, label)
            loss.backward()
            optimizer.step()
            if batch_idx % 10 == 0:
                print(f"Train Epoch: {epoch} [{batch_idx * len(a)}/{len(train)}]\tLoss: {loss.item():.6f}")
        print(f"Epoch {epoch} test AUC: {test(model, test_loader):.4f}")
        scheduler.step()
    torch.save(model.state_dict(), "siamese_network.pt")


if __name__ == "__main__":
    main()
