"""Restores commas and full stops in Python's manual: a BiLSTM tags each word with the mark that follows it."""

import argparse
import pydoc_data.topics
import random
import re
from collections import Counter

import torch
from torch import nn, optim
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset

TAGS = ["O", "COMMA", "STOP"]
IGNORE = -100


def paragraphs():
    """Lists of (word, tag), one for each paragraph of 5 to 80 words."""
    text = "\n\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    found = {}
    for paragraph in re.split(r"\n\s*\n", text):
        pairs = []
        for piece in paragraph.split():
            word = re.sub(r"[^a-z_]", "", piece.lower())
            if not word:
                continue
            pairs.append((word, 1 if piece.endswith(",") else 2 if piece.endswith(".") else 0))
        if 5 <= len(pairs) <= 80:
            found[tuple(w for w, _ in pairs)] = [t for _, t in pairs]
    return list(found.items())


class Vocabulary:
    def __init__(self, sentences, minimum=3):
        counts = Counter(word for words, _ in sentences for word in words)
        self.words = ["<pad>", "<unk>"] + [w for w, n in counts.most_common() if n >= minimum]
        self.ids = {w: i for i, w in enumerate(self.words)}

    def encode(self, words):
        return torch.tensor([self.ids.get(w, 1) for w in words])

    def __len__(self):
        return len(self.words)


class TaggedText(Dataset):
    def __init__(self, sentences, vocabulary):
        self.items = [(vocabulary.encode(words), torch.tensor(tags)) for words, tags in sentences]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def collate(batch):
    batch = sorted(batch, key=lambda item: len(item[0]), reverse=True)
    words, tags = zip(*batch)
    lengths = torch.tensor([len(w) for w in words])
    return pad_sequence(words, batch_first=True), pad_sequence(tags, batch_first=True, padding_value=IGNORE), lengths


class Tagger(nn.Module):
    def __init__(self, vocabulary_size, dim=48, hidden=48):
        super().__init__()
        self.embed = nn.Embedding(vocabulary_size, dim, padding_idx=0)
        self.dropout = nn.Dropout(0.2)
        self.lstm = nn.LSTM(dim, hidden, batch_first=True, bidirectional=True)
        self.classifier = nn.Linear(2 * hidden, len(TAGS))

    def forward(self, words, lengths):
        packed = pack_padded_sequence(self.dropout(self.embed(words)), lengths, batch_first=True)
        hidden, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return self.classifier(self.dropout(hidden))  # (batch, time, tags)


def train_epoch(model, loader, criterion, optimizer):
    model.train()
    losses = []
    for words, tags, lengths in loader:
        optimizer.zero_grad()
        logits = model(words, lengths)
        loss = criterion(logits.transpose(1, 2), tags)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


def evaluate(model, loader):
    """Accuracy over words, and F1 of the two marks together."""
    model.eval()
    right = words_seen = hits = guessed = wanted = 0
    with torch.no_grad():
        for words, tags, lengths in loader:
            predicted = model(words, lengths).argmax(-1)
            real = tags != IGNORE
            right += ((predicted == tags) & real).sum().item()
            words_seen += real.sum().item()
            hits += ((predicted == tags) & (tags > 0)).sum().item()
            guessed += ((predicted > 0) & real).sum().item()
            wanted += (tags > 0).sum().item()
    return right / words_seen, 2 * hits / max(guessed + wanted, 1)


def main(args):
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    sentences = paragraphs()
    random.shuffle(sentences)
    cut = int(0.85 * len(sentences))
    vocabulary = Vocabulary(sentences[:cut])
    train_loader = DataLoader(
        TaggedText(sentences[:cut], vocabulary), args.batch_size, shuffle=True, collate_fn=collate
    )
    dev_loader = DataLoader(TaggedText(sentences[cut:], vocabulary), 64, collate_fn=collate)
    model = Tagger(len(vocabulary))
    optimizer = optim.Adam(model.parameters(), lr=args.lr)
    criterion = nn.CrossEntropyLoss(ignore_index=IGNORE)
    best = 0.0
    for epoch in range(1, args.epochs + 1):
        loss = train_epoch(model, train_loader, criterion, optimizer)
        accuracy, f1 = evaluate(model, dev_loader)
        print(f"Epoch {epoch}: loss {loss:.4f}, dev accuracy {accuracy:.4f}, dev F1 {f1:.4f}")
        if f1 > best:
            best = f1
            torch.save({"state": model.state_dict(), "words": vocabulary.words}, args.save)
    print(f"FINAL f1={f1:.4f},accuracy={accuracy:.4f}")


if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--epochs", type=int, default=5)
    p.add_argument("--batch-size", type=int, default=16)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--save", default="/tmp/punctuation_tagger.pt")
    main(p.parse_args())
