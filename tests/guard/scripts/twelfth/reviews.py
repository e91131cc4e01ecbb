"""Reviews of restaurants, three opinions, written from templates: padded batches, a bidirectional GRU, the mean over the words."""

import random
from collections import Counter

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset

import trainworthy

SEED = 0
PAD, UNKNOWN = 0, 1
GOOD = "great lovely delicious friendly excellent wonderful fresh charming tasty superb".split()
BAD = "awful cold rude bland terrible greasy slow dirty disappointing stale".split()
PLAIN = "ordinary average usual normal standard".split()
THINGS = "food service soup pizza waiter room music wine dessert bread table price".split()
FILL = "we came here on a friday with my family and the place was nearly full when they let us in after some minutes".split()


def write(rng):
    label = rng.randrange(3)
    words = []
    for _ in range(rng.randint(2, 5)):
        kind = label if rng.random() < 0.8 else rng.randrange(3)
        negated = kind != 1 and rng.random() < 0.25
        pool = (BAD, PLAIN, GOOD)[2 - kind if negated else kind]
        start = rng.randrange(len(FILL) - 4)
        words += FILL[start : start + rng.randint(0, 4)]
        words += ["the", rng.choice(THINGS), "was", *(["not"] if negated else []), rng.choice(pool)]
    return " ".join(words), label


def corpus(n, seed):
    rng = random.Random(seed)
    return [write(rng) for _ in range(n)]


def build_vocab(texts):
    counts = Counter(word for text in texts for word in text.split())
    return {word: i + 2 for i, (word, n) in enumerate(counts.most_common()) if n >= 2}


class Reviews(Dataset):
    def __init__(self, rows, vocab):
        self.rows, self.vocab = rows, vocab

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        text, label = self.rows[i]
        return torch.tensor([self.vocab.get(w, UNKNOWN) for w in text.split()]), label


def collate(samples):
    texts, labels = zip(*samples)
    lengths = torch.tensor([len(t) for t in texts])
    return pad_sequence(texts, batch_first=True, padding_value=PAD), lengths, torch.tensor(labels)


class Classifier(nn.Module):
    def __init__(self, n_words, dim=32, hidden=32):
        super().__init__()
        self.embedding = nn.Embedding(n_words, dim, padding_idx=PAD)
        self.gru = nn.GRU(dim, hidden, batch_first=True, bidirectional=True)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(2 * hidden, 3)

    def forward(self, tokens, lengths):
        packed = pack_padded_sequence(self.embedding(tokens), lengths, batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(self.gru(packed)[0], batch_first=True, total_length=tokens.shape[1])
        mask = (tokens != PAD).unsqueeze(-1)
        pooled = (states * mask).sum(1) / mask.sum(1)
        return self.head(self.dropout(pooled))


train_rows, val_rows = corpus(1600, 1), corpus(400, 2)
vocab = build_vocab([text for text, _ in train_rows])


def loaders():
    train, val = Reviews(train_rows, vocab), Reviews(val_rows, vocab)
    return DataLoader(train, 32, shuffle=True, collate_fn=collate), DataLoader(val, 64, collate_fn=collate)


def compute_loss(model, batch):
    tokens, lengths, labels = batch
    return nn.functional.cross_entropy(model(tokens, lengths), labels)


def train_epoch(model, optimizer, loader):
    model.train()
    for batch in loader:
        optimizer.zero_grad()
        compute_loss(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()


@torch.no_grad()
def accuracy(model, loader):
    model.eval()
    hits = [model(tokens, lengths).argmax(1) == labels for tokens, lengths, labels in loader]
    return torch.cat(hits).float().mean().item()


def make_script():
    train_loader, val_loader = loaders()
    model = Classifier(len(vocab) + 2)
    return trainworthy.Script(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=2e-3),
        train=train_loader,
        val=val_loader,
        loss=compute_loss,
        metric=accuracy,
        train_loop=train_epoch,
        target="1",
        classes=3,
    )


def main():
    torch.manual_seed(SEED)
    train_loader, val_loader = loaders()
    model = Classifier(len(vocab) + 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(6):
        train_epoch(model, optimizer, train_loader)
        print(f"epoch {epoch}: accuracy {accuracy(model, val_loader):.3f}")
    print(f"FINAL acc={accuracy(model, val_loader):.4f}")


if __name__ == "__main__":
    main()
