"""Sums of number words, read by a GRU: a curriculum sampler begins with the short sums and lets longer ones in epoch by epoch."""

import random

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler

WORDS = "<pad> zero one two three four five six seven eight nine plus minus times".split()
ID = {w: i for i, w in enumerate(WORDS)}
MODULO = 7


def example(rng):
    value = rng.randint(0, 9)
    words = [WORDS[value + 1]]
    for _ in range(rng.randint(1, 4)):
        n, op = rng.randint(0, 9), rng.choice(["plus", "minus"])
        value += n if op == "plus" else -n
        words += [op, WORDS[n + 1]]
    return [ID[w] for w in words], int(value > 4)


class Sums(Dataset):
    def __init__(self, n, seed):
        rng = random.Random(seed)
        self.rows = [example(rng) for _ in range(n)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


class Curriculum(Sampler):
    """Shuffles the easiest share of the data; the share grows with `set_epoch`."""

    def __init__(self, difficulty, epochs):
        self.order = sorted(range(len(difficulty)), key=lambda i: difficulty[i])
        self.epochs, self.epoch = epochs, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def _count(self):
        return int(len(self.order) * min(1.0, 0.4 + 0.6 * self.epoch / (self.epochs / 2)))

    def __len__(self):
        return self._count()

    def __iter__(self):
        chosen = self.order[: self._count()]
        random.shuffle(chosen)
        return iter(chosen)


def collate(rows):
    ids = [torch.tensor(r[0]) for r in rows]
    lengths = torch.tensor([len(i) for i in ids])
    return pad_sequence(ids, batch_first=True), lengths, torch.tensor([r[1] for r in rows])


class Reader(nn.Module):
    def __init__(self, dim=24, hidden=64):
        super().__init__()
        self.embed = nn.Embedding(len(WORDS), dim, padding_idx=0)
        self.rnn = nn.GRU(dim, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 2)

    def forward(self, ids, lengths):
        states, _ = self.rnn(self.embed(ids))
        last = states[torch.arange(len(ids)), lengths - 1]
        return self.head(last)


def main():
    torch.manual_seed(0)
    random.seed(0)
    train, val = Sums(4000, 1), Sums(800, 2)
    epochs = 10
    sampler = Curriculum([len(r[0]) for r in train.rows], epochs)
    loader = DataLoader(train, batch_size=64, sampler=sampler, collate_fn=collate)
    val_loader = DataLoader(val, batch_size=200, collate_fn=collate)
    model = Reader()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        model.train()
        losses = []
        for ids, lengths, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(ids, lengths), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            right = sum((model(ids, lengths).argmax(1) == y).sum().item() for ids, lengths, y in val_loader)
        print(
            f"epoch {epoch} on {len(sampler)} sums: loss {sum(losses) / len(losses):.3f} accuracy {right / len(val):.4f}"
        )
    print(f"FINAL accuracy={right / len(val):.4f}")


if __name__ == "__main__":
    main()
