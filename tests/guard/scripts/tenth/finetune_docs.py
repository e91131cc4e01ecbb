"""ULMFiT in small: a language model over the standard library's docstrings, then its encoder tells which package a sentence is from."""

import ast
import random
import re
import sysconfig
from collections import Counter
from functools import lru_cache
from pathlib import Path

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

SEED = 0
STDLIB = Path(sysconfig.get_paths()["stdlib"])
TARGETS = ["argparse.py", "_pydecimal.py", "unittest", "email", "asyncio", "logging", "tkinter", "http"]
PAD, UNK, VOCAB_SIZE, DIM = 0, 1, 1500, 80
criterion = nn.CrossEntropyLoss()


def docstrings(path):
    files = sorted(path.glob("*.py")) if path.is_dir() else [path]
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(errors="ignore"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef | ast.Module):
                yield from re.split(r"(?<=[.!?])\s+|\n\s*\n", ast.get_docstring(node) or "")


def tokenize(text):
    return re.findall(r"[a-z]+|[0-9]+|[^\sa-z0-9]", text.lower())


def sentences(path):
    found = dict.fromkeys(" ".join(tokenize(s)) for s in docstrings(path))
    return [s.split() for s in found if 4 <= len(s.split()) <= 30]


@lru_cache
def read():
    general = [s for f in sorted(STDLIB.glob("*.py"))[::2] if f.name not in TARGETS for s in sentences(f)]
    labelled = []
    for label, name in enumerate(TARGETS):
        some = sentences(STDLIB / name)
        random.Random(SEED).shuffle(some)
        labelled += [(s, label) for s in some[:160]]
    random.Random(SEED + 1).shuffle(labelled)
    return general, labelled


def build_vocab(texts):
    counts = Counter(w for s in texts for w in s)
    return {w: i + 2 for i, (w, _) in enumerate(counts.most_common(VOCAB_SIZE - 2))}


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB_SIZE, DIM, padding_idx=PAD)
        self.rnn = nn.GRU(DIM, DIM, batch_first=True)

    def forward(self, ids):
        return self.rnn(self.embed(ids))[0]


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.decoder = nn.Linear(DIM, VOCAB_SIZE)
        self.decoder.weight = self.encoder.embed.weight

    def forward(self, ids):
        return self.decoder(self.encoder(ids))


class Classifier(nn.Module):
    def __init__(self, encoder, n_classes):
        super().__init__()
        self.encoder = encoder
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(2 * DIM, 64), nn.ReLU(), nn.Linear(64, n_classes))

    def forward(self, ids):
        out, mask = self.encoder(ids), (ids != PAD).unsqueeze(-1)
        mean = (out * mask).sum(1) / mask.sum(1)
        top = out.masked_fill(~mask, -1e4).max(1).values
        return self.head(torch.cat([mean, top], dim=1))


@lru_cache
def pretrain():
    """The vocabulary and the weights of the language model's encoder."""
    torch.manual_seed(SEED)
    general, _ = read()
    vocab = build_vocab(general)
    rows = [torch.tensor([vocab.get(w, UNK) for w in s]) for s in general]
    lm = LanguageModel()
    nn.init.normal_(lm.encoder.embed.weight, std=0.1)
    opt = torch.optim.Adam(lm.parameters(), lr=4e-3)
    for step in range(100):
        ids = pad_sequence(random.sample(rows, 48), batch_first=True, padding_value=PAD)
        loss = nn.functional.cross_entropy(lm(ids[:, :-1]).transpose(1, 2), ids[:, 1:], ignore_index=PAD)
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(f"LM loss {loss.item():.3f}")
    return vocab, lm.encoder.state_dict()


def collate(batch):
    ids, labels = zip(*batch)
    return pad_sequence(list(ids), batch_first=True, padding_value=PAD), torch.tensor(labels)


def get_sets():
    vocab, _ = pretrain()
    _, labelled = read()
    rows = [(torch.tensor([vocab.get(w, UNK) for w in s]), y) for s, y in labelled]
    return rows[:600], rows[600:]


def new_classifier():
    encoder = Encoder()
    encoder.load_state_dict(pretrain()[1])
    return Classifier(encoder, len(TARGETS))


def param_groups(model):
    return [{"params": model.encoder.parameters(), "lr": 3e-3}, {"params": model.head.parameters(), "lr": 4e-3}]


def train_epoch(model, optimizer, loader):
    model.train()
    for ids, labels in loader:
        optimizer.zero_grad()
        criterion(model(ids), labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@torch.no_grad()
def accuracy(model, loader):
    model.eval()
    hits = [(model(ids).argmax(1) == labels) for ids, labels in loader]
    return torch.cat(hits).float().mean().item()


def make_script():
    import trainworthy

    train_set, val_set = get_sets()
    model = new_classifier()
    return trainworthy.Script(
        model=model,
        optimizer=torch.optim.Adam(param_groups(model)),
        train=train_set,
        val=val_set,
        collate=collate,
        batch_size=20,
        loss=lambda model, batch: criterion(model(batch[0]), batch[1]),
        metric=accuracy,
        train_loop=train_epoch,
        classes=TARGETS,
    )


def main():
    random.seed(SEED)
    train_set, val_set = get_sets()
    torch.manual_seed(SEED)
    train_dl = torch.utils.data.DataLoader(train_set, batch_size=20, shuffle=True, collate_fn=collate)
    val_dl = torch.utils.data.DataLoader(val_set, batch_size=100, collate_fn=collate)
    model = new_classifier()
    model.encoder.requires_grad_(False)
    optimizer = torch.optim.Adam(model.head.parameters(), lr=4e-3)
    for epoch in range(2):
        train_epoch(model, optimizer, train_dl)
        print(f"head only, epoch {epoch}: {accuracy(model, val_dl):.4f}")
    model.encoder.requires_grad_(True)
    optimizer = torch.optim.Adam(param_groups(model))
    for epoch in range(8):
        train_epoch(model, optimizer, train_dl)
        print(f"all layers, epoch {epoch}: {accuracy(model, val_dl):.4f}")
    print(f"FINAL acc={accuracy(model, val_dl):.4f}")


if __name__ == "__main__":
    main()
