"""Which library does a sentence of documentation come from? A bidirectional LSTM on padded and packed words, in the style of the tutorials."""

import inspect
import random
import re
from collections import Counter

import numpy as np
import torch
import torch.nn as nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader

SEED = 0
random.seed(SEED)
torch.manual_seed(SEED)

EMBED, HIDDEN, EPOCHS = 48, 48, 5
MAX_LEN = 30


def sentences(module):
    found = []
    for name in sorted(dir(module)):
        doc = inspect.getdoc(getattr(module, name)) or ""
        for sentence in re.split(r"\.\s+|\n\n", doc):
            words = re.findall(r"[a-z]+", sentence.lower())
            if 5 <= len(words) <= 60:
                found.append(words[:MAX_LEN])
    return found


def load_data():
    import os
    import socket
    import string
    import subprocess

    import numpy

    groups = [
        [numpy, numpy.linalg],
        [torch.nn.functional, torch.Tensor, torch.linalg],
        [os, socket, string, subprocess, inspect, random, re],
    ]
    data = []
    for label, modules in enumerate(groups):
        texts = sorted({tuple(s) for m in modules for s in sentences(m)})
        random.shuffle(texts)
        data += [(list(t), label) for t in texts[:700]]
    random.shuffle(data)
    return data


data = load_data()
cut = int(0.8 * len(data))
train_data, test_data = data[:cut], data[cut:]

counter = Counter(w for words, _ in train_data for w in words)
vocab = {"<pad>": 0, "<unk>": 1}
for word, n in counter.most_common():
    if n >= 2:
        vocab[word] = len(vocab)


def collate(batch):
    texts = [torch.tensor([vocab.get(w, 1) for w in words]) for words, _ in batch]
    labels = torch.tensor([label for _, label in batch])
    lengths = torch.tensor([len(t) for t in texts])
    texts = pad_sequence(texts, batch_first=True, padding_value=0)
    lengths, order = lengths.sort(descending=True)
    texts, labels = texts[order], labels[order]
    return texts, lengths, labels


train_loader = DataLoader(train_data, batch_size=32, shuffle=True, collate_fn=collate)
test_loader = DataLoader(test_data, batch_size=64, collate_fn=collate)


class Classifier(nn.Module):
    def __init__(self, vocab_size, num_classes):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, EMBED, padding_idx=0)
        self.lstm = nn.LSTM(EMBED, HIDDEN, batch_first=True, bidirectional=True)
        self.dropout = nn.Dropout(0.3)
        self.fc = nn.Linear(2 * HIDDEN, num_classes)

    def forward(self, text, lengths):
        embedded = self.dropout(self.embedding(text))
        packed = pack_padded_sequence(embedded, lengths, batch_first=True)
        _, (hidden, _) = self.lstm(packed)
        features = torch.cat((hidden[-2], hidden[-1]), dim=1)
        return self.fc(self.dropout(features))


model = Classifier(len(vocab), 3)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)


def evaluate():
    model.eval()
    correct = 0
    with torch.no_grad():
        for text, lengths, labels in test_loader:
            correct += (model(text, lengths).argmax(1) == labels).sum().item()
    return correct / len(test_data)


for epoch in range(EPOCHS):
    model.train()
    losses = []
    for text, lengths, labels in train_loader:
        optimizer.zero_grad()
        loss = criterion(model(text, lengths), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    acc = evaluate()
    print(f"Epoch: {epoch + 1:02} | Train Loss: {np.mean(losses):.3f} | Test Acc: {acc * 100:.2f}%")

print(f"FINAL accuracy={acc:.4f}")
