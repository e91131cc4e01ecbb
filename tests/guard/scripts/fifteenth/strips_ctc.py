"""Strips of three to five handwritten digits, read from left to right: a CNN over columns, a bidirectional GRU, CTC."""

import random

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset

import trainworthy

SEED = 0
BLANK = 0
data = load_digits()
images = torch.tensor(data.images / 16, dtype=torch.float32)


class Strips(Dataset):
    def __init__(self, first, last, n, seed):
        rng = random.Random(seed)
        self.rows = [[rng.randrange(first, last) for _ in range(rng.randint(3, 5))] for _ in range(n)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        strip = torch.cat([images[r] for r in self.rows[i]], dim=1)  # 8 x (8 n)
        return strip, torch.tensor([data.target[r] + 1 for r in self.rows[i]])


def collate(samples):
    strips, texts = zip(*samples)
    width = max(s.shape[1] for s in strips)
    padded = torch.stack([nn.functional.pad(s, (0, width - s.shape[1])) for s in strips]).unsqueeze(1)
    longest = max(len(t) for t in texts)
    labels = torch.stack([nn.functional.pad(t, (0, longest - len(t))) for t in texts])
    return {
        "images": padded,
        "widths": torch.tensor([s.shape[1] // 2 for s in strips]),
        "labels": labels,
        "label_lengths": torch.tensor([len(t) for t in texts]),
    }


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.cnn = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 48, 3, padding=1), nn.ReLU(), nn.MaxPool2d((2, 1)),
        )  # fmt: skip
        self.gru = nn.GRU(96, 64, batch_first=True, bidirectional=True)
        self.out = nn.Linear(128, 11)

    def forward(self, images):
        h = self.cnn(images)  # B, 48, 2, W / 2
        h = h.permute(0, 3, 1, 2).flatten(2)
        return self.out(self.gru(h)[0]).log_softmax(-1)


ctc = nn.CTCLoss(blank=BLANK, zero_infinity=True)


def compute_loss(model, batch):
    log_probs = model(batch["images"]).transpose(0, 1)  # T, B, classes
    return ctc(log_probs, batch["labels"], batch["widths"], batch["label_lengths"])


def train_epoch(model, optimizer, loader):
    model.train()
    for batch in loader:
        loss = compute_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()


@torch.no_grad()
def whole_strips(model, loader):
    model.eval()
    right = total = 0
    for batch in loader:
        best = model(batch["images"]).argmax(-1)
        for path, width, label, n in zip(best, batch["widths"], batch["labels"], batch["label_lengths"]):
            collapsed = torch.unique_consecutive(path[:width])
            right += collapsed[collapsed != BLANK].tolist() == label[:n].tolist()
            total += 1
    return right / total


train_set, val_set = Strips(0, 1400, 1500, 1), Strips(1400, 1797, 300, 2)


def make_script():
    model = Reader()
    return trainworthy.Script(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
        train=train_set,
        val=val_set,
        batch_size=32,
        collate=collate,
        target="labels",
        loss=compute_loss,
        metric=whole_strips,
        floor=0.0,
        train_loop=train_epoch,
    )


def main():
    torch.manual_seed(SEED)
    model = Reader()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    train_loader = DataLoader(train_set, 32, shuffle=True, collate_fn=collate)
    val_loader = DataLoader(val_set, 100, collate_fn=collate)
    for epoch in range(10):
        train_epoch(model, optimizer, train_loader)
        if epoch % 2:
            print(epoch + 1, whole_strips(model, val_loader))
    print(f"FINAL strips={whole_strips(model, val_loader):.4f}")


if __name__ == "__main__":
    main()
