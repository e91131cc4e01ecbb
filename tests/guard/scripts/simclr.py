"""SimCLR on the digits: two views, projection head, NT-Xent, and a linear probe with few labels."""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import nn, optim
from torch.utils.data import DataLoader, Dataset


class RandomTransform:
    """Shift, scale of the ink, erased block, noise."""

    def __call__(self, img):
        dx, dy = torch.randint(-1, 2, (2,)).tolist()
        img = torch.roll(img, (dy, dx), (1, 2))
        img = img * torch.empty(1).uniform_(0.6, 1.4)
        i, j = torch.randint(0, 6, (2,)).tolist()
        img = img.clone()
        img[:, i : i + 3, j : j + 3] = 0
        return img + 0.1 * torch.randn_like(img)


class TwoCropsTransform:
    def __init__(self, base_transform):
        self.base_transform = base_transform

    def __call__(self, x):
        q = self.base_transform(x)
        k = self.base_transform(x)
        return q, k


class DigitPairs(Dataset):
    def __init__(self, images, transform):
        self.images, self.transform = images, transform

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.transform(self.images[i])


class SimCLR(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 24, 3, padding=1, bias=False),
            nn.BatchNorm2d(24),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(24, 48, 3, padding=1, bias=False),
            nn.BatchNorm2d(48),
            nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(192, 64),
        )
        self.projector = nn.Sequential(nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, dim))

    def forward(self, x):
        return self.projector(self.encoder(x))


def nt_xent(z1, z2, temperature):
    n = z1.size(0)
    z = F.normalize(torch.cat([z1, z2], dim=0), dim=1)
    sim = z @ z.t() / temperature
    sim = sim.masked_fill(torch.eye(2 * n, dtype=torch.bool), -1e9)
    targets = torch.cat([torch.arange(n, 2 * n), torch.arange(n)])
    return F.cross_entropy(sim, targets)


@torch.no_grad()
def features(model, images):
    model.eval()
    return torch.cat([model.encoder(part) for part in images.split(256)]).numpy()


def linear_probe(model, images, labels, n_labels):
    """Accuracy of a logistic regression on the encoder's features, with few labelled images."""
    few = torch.cat([(labels[:1200] == c).nonzero()[:n_labels, 0] for c in range(10)])
    probe = LogisticRegression(max_iter=500).fit(features(model, images[few]), labels[few].numpy())
    return probe.score(features(model, images[1200:]), labels[1200:].numpy())


def main():
    parser = argparse.ArgumentParser(description="SimCLR")
    parser.add_argument("--epochs", default=12, type=int)
    parser.add_argument("--batch-size", default=128, type=int)
    parser.add_argument("--lr", default=3e-3, type=float)
    parser.add_argument("--wd", default=1e-4, type=float)
    parser.add_argument("--temperature", default=0.2, type=float)
    parser.add_argument("--seed", default=0, type=int)
    args = parser.parse_args()
    torch.manual_seed(args.seed)

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    dataset = DigitPairs(images[:1200], TwoCropsTransform(RandomTransform()))
    loader = DataLoader(dataset, batch_size=args.batch_size, shuffle=True, drop_last=True)

    model = SimCLR()
    optimizer = optim.AdamW(model.parameters(), args.lr, weight_decay=args.wd)
    scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs * len(loader))
    print(f"probe before training {linear_probe(model, images, labels, 5):.3f}")
    for epoch in range(args.epochs):
        model.train()
        total = 0.0
        for x1, x2 in loader:
            loss = nt_xent(model(x1), model(x2), args.temperature)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            total += loss.item()
        print(f"epoch {epoch} loss {total / len(loader):.4f}")
        torch.save(
            {"epoch": epoch, "state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}, "simclr.pth.tar"
        )
    print(f"linear probe accuracy {linear_probe(model, images, labels, 5):.4f}")


if __name__ == "__main__":
    main()
