"""Multi-label: which digits are in a picture of three (pos_weight, OneCycle per step, workers, F1 every N steps)."""

import os

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.metrics import f1_score
from torch import nn
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

SEED = 11
EPOCHS = 8
EVAL_EVERY = 60
np.random.seed(SEED)
torch.manual_seed(SEED)


class Scenes(Dataset):
    def __init__(self, images, labels, n, rng, train):
        self.train = train
        self.x = np.zeros((n, 1, 12, 28), np.float32)
        self.y = np.zeros((n, 10), np.float32)
        for i in range(n):
            k = rng.randint(1, 4)
            for slot in range(k):
                j = rng.randint(len(images))
                t, left = rng.randint(0, 5), slot * 9 + rng.randint(0, 2)
                self.x[i, 0, t : t + 8, left : left + 8] = images[j]
                self.y[i, labels[j]] = 1

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        x = torch.from_numpy(self.x[i])
        if self.train:
            x = x + 0.1 * torch.randn_like(x)
            dx = int(torch.randint(-1, 2, ()))
            x = torch.roll(x, dx, dims=-1)
        return x, torch.from_numpy(self.y[i])


class Net(nn.Module):
    def __init__(self):
        super().__init__()

        def block(i, o):
            return nn.Sequential(nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True))

        self.features = nn.Sequential(
            block(1, 24), block(24, 24), nn.MaxPool2d(2), block(24, 48), block(48, 48), nn.MaxPool2d(2), block(48, 64)
        )
        self.drop = nn.Dropout(0.2)
        self.classifier = nn.Linear(64, 10)

    def forward(self, x):
        f = self.features(x).amax((2, 3))
        return self.classifier(self.drop(f))


def evaluate(net, loader):
    net.eval()
    probs, truth = [], []
    with torch.no_grad():
        for x, y in loader:
            probs.append(torch.sigmoid(net(x)))
            truth.append(y)
    net.train()
    p, t = torch.cat(probs).numpy(), torch.cat(truth).numpy()
    return f1_score(t, p > 0.5, average="macro", zero_division=0)


if __name__ == "__main__":
    d = load_digits()
    images = (d.images / 16).astype(np.float32)
    train = Scenes(images[:1200], d.target[:1200], 1600, np.random.RandomState(0), True)
    val = Scenes(images[1200:], d.target[1200:], 300, np.random.RandomState(1), False)
    train_loader = DataLoader(train, 40, shuffle=True, num_workers=2, persistent_workers=True)
    val_loader = DataLoader(val, 100)
    net = Net()
    positive = torch.from_numpy(train.y).sum(0)
    pos_weight = (len(train) - positive) / positive
    criterion = nn.BCEWithLogitsLoss(pos_weight=pos_weight)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=1e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=EPOCHS * len(train_loader))
    step, best = 0, 0.0
    for epoch in range(EPOCHS):
        bar = tqdm(train_loader, desc=f"epoch {epoch}", disable=bool(os.environ.get("QUIET")))
        for x, y in bar:
            loss = criterion(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            step += 1
            bar.set_postfix(loss=f"{loss.item():.3f}")
            if step % EVAL_EVERY == 0:
                f1 = evaluate(net, val_loader)
                tqdm.write(f"step {step} macro F1 {f1:.4f}")
                if f1 > best:
                    best = f1
                    torch.save(net.state_dict(), "multilabel_best.pt")
    print(f"best macro F1 {best:.4f}, last {evaluate(net, val_loader):.4f}")
