"""CRNN + CTC: read rows of 3 to 5 digits (captcha recogniser)."""

import argparse

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset

CHARS = "-0123456789"  # index 0 is the blank


class Captcha(Dataset):
    def __init__(self, images, labels, size, seed):
        rng = np.random.RandomState(seed)
        self.samples = []
        for _ in range(size):
            n = rng.randint(3, 6)
            pick = rng.randint(len(images), size=n)
            canvas = np.zeros((8, 48), np.float32)
            x = rng.randint(0, 4)
            for k in pick:
                canvas[:, x : x + 8] = np.maximum(canvas[:, x : x + 8], images[k])
                x += 8 + rng.randint(0, 2)
            self.samples.append(
                (canvas + 0.05 * rng.randn(8, 48).astype(np.float32), "".join(str(labels[k]) for k in pick))
            )

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, i):
        image, text = self.samples[i]
        target = torch.tensor([CHARS.index(c) for c in text])
        return torch.from_numpy(image)[None], target, len(text)


def collate(batch):
    images, targets, lengths = zip(*batch)
    return torch.stack(images), torch.cat(targets), torch.tensor(lengths)


class CRNN(nn.Module):
    def __init__(self, hidden=48):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d((2, 1)),
        )
        self.rnn = nn.LSTM(64, hidden, bidirectional=True, batch_first=True)
        self.fc = nn.Linear(2 * hidden, len(CHARS))

    def forward(self, x):
        f = self.conv(x)  # B, 32, 2, 24
        b, c, h, w = f.shape
        f = f.permute(0, 3, 1, 2).reshape(b, w, c * h)
        f, _ = self.rnn(f)
        logits = self.fc(f)  # B, T, C
        return logits.permute(1, 0, 2).log_softmax(2)  # T, B, C


def greedy(log_probs):
    best = log_probs.argmax(2).t().tolist()
    out = []
    for row in best:
        text, last = "", 0
        for k in row:
            if k != last and k != 0:
                text += CHARS[k]
            last = k
        out.append(text)
    return out


def edit(a, b):
    d = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        prev, d[0] = d[0], i
        for j, y in enumerate(b, 1):
            prev, d[j] = d[j], min(d[j] + 1, d[j - 1] + 1, prev + (x != y))
    return d[-1]


def validate(model, loader):
    model.eval()
    errors = total = right = 0
    with torch.no_grad():
        for images, targets, lengths in loader:
            texts = greedy(model(images))
            for text, t in zip(texts, targets.split(lengths.tolist())):
                truth = "".join(CHARS[k] for k in t)
                errors += edit(text, truth)
                total += len(truth)
                right += text == truth
    return errors / total, right / len(loader.dataset)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=10)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--lr", type=float, default=4e-3)
    a = p.parse_args()
    torch.manual_seed(0)
    d = load_digits()
    images = (d.images / 16).astype(np.float32)
    train = DataLoader(
        Captcha(images[:1300], d.target[:1300], 1500, 0), a.batch, shuffle=True, collate_fn=collate, drop_last=True
    )
    val = DataLoader(Captcha(images[1300:], d.target[1300:], 300, 1), 100, collate_fn=collate)
    model = CRNN()
    criterion = nn.CTCLoss(blank=0, zero_infinity=True)
    optimizer = torch.optim.Adam(model.parameters(), a.lr)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, a.lr, epochs=a.epochs, steps_per_epoch=len(train))
    best = 1.0
    for epoch in range(a.epochs):
        model.train()
        running = 0.0
        for images, targets, lengths in train:
            log_probs = model(images)
            input_lengths = torch.full((images.size(0),), log_probs.size(0), dtype=torch.long)
            loss = criterion(log_probs, targets, input_lengths, lengths)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5)
            optimizer.step()
            scheduler.step()
            running += loss.item()
        cer, exact = validate(model, val)
        print(f"epoch {epoch} loss {running / len(train):.3f} val CER {cer:.3f} exact {exact:.3f}")
        if cer < best:
            best = cer
            torch.save({"model": model.state_dict(), "epoch": epoch, "cer": cer}, "best.pt")


if __name__ == "__main__":
    main()
