"""A small transformer encoder reads a paragraph of documentation and names its subpackage (scipy and sklearn). Early stopping on the validation set."""

import ast
import collections
import copy
import os
import pathlib
import random
import re

import scipy
import sklearn
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import trainworthy

SEED = int(os.environ.get("SEED", "0"))
PACKAGES = ["stats", "signal", "sparse", "optimize", "linear_model", "ensemble", "metrics", "spatial"]
PAD, UNK, LENGTH, DIM, EPOCHS = 0, 1, 32, 64, 8


def read_paragraphs():
    rows = []
    for root in (scipy, sklearn):
        base = pathlib.Path(root.__file__).parent
        for path in sorted(base.rglob("*.py")):
            package = path.relative_to(base).parts[0]
            if package not in PACKAGES or "tests" in path.parts:
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                    for text in (ast.get_docstring(node) or "").split("\n\n"):
                        words = re.findall(r"[a-z]{2,}", text.lower())
                        if len(words) >= 12 and ">>>" not in text:
                            rows.append((tuple(words[:LENGTH]), package))
    rows = sorted(set(rows))
    counts = collections.Counter(package for _, package in rows)
    random.Random(17).shuffle(rows)
    kept = collections.Counter()
    limit = min(min(counts.values()), 450)
    return [row for row in rows if kept.update([row[1]]) or kept[row[1]] <= limit]


class Vocab:
    def __init__(self, rows, min_count=2):
        counts = collections.Counter(word for words, _ in rows for word in words)
        names = sorted(word for word, n in counts.items() if n >= min_count)
        self.index = {word: i for i, word in enumerate(names, start=2)}

    def encode(self, words):
        return [self.index.get(word, UNK) for word in words]


class Paragraphs(Dataset):
    def __init__(self, rows, vocab):
        self.rows = [(vocab.encode(words), PACKAGES.index(package)) for words, package in rows]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        ids, label = self.rows[i]
        return {"ids": torch.tensor(ids), "label": label}


def collate(items):
    ids = nn.utils.rnn.pad_sequence([item["ids"] for item in items], batch_first=True, padding_value=PAD)
    return {"ids": ids, "label": torch.tensor([item["label"] for item in items])}


class Classifier(nn.Module):
    def __init__(self, words):
        super().__init__()
        self.embed = nn.Embedding(words, DIM, padding_idx=PAD)
        self.position = nn.Embedding(LENGTH, DIM)
        nn.init.normal_(self.position.weight, std=0.02)
        layer = nn.TransformerEncoderLayer(DIM, 4, 2 * DIM, dropout=0.2, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, norm=nn.LayerNorm(DIM), enable_nested_tensor=False)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(DIM, len(PACKAGES))

    def forward(self, ids):
        padding = ids == PAD
        x = self.drop(self.embed(ids) + self.position(torch.arange(ids.shape[1])))
        x = self.encoder(x, src_key_padding_mask=padding)
        x = x.masked_fill(padding[:, :, None], 0.0).sum(1) / (~padding).sum(1, keepdim=True)
        return self.head(self.drop(x))


rows = read_paragraphs()
n_val = len(rows) // 6
vocab = Vocab(rows[2 * n_val :])
test_set, val_set = Paragraphs(rows[:n_val], vocab), Paragraphs(rows[n_val : 2 * n_val], vocab)
train_set = Paragraphs(rows[2 * n_val :], vocab)
train_loader = DataLoader(train_set, 32, shuffle=True, collate_fn=collate)
val_loader, test_loader = (DataLoader(part, 128, collate_fn=collate) for part in (val_set, test_set))


def build():
    model = Classifier(len(vocab.index) + 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)
    warmup, peak = 50, 3e-3
    noam = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: peak * min((step + 1) / warmup, (warmup / (step + 1)) ** 0.5)
    )
    return model, optimizer, noam


def loss_of(model, batch):
    return F.cross_entropy(model(batch["ids"]), batch["label"], label_smoothing=0.1)


def train_epoch(model, optimizer, noam, loader):
    model.train()
    for batch in loader:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        noam.step()


@torch.no_grad()
def accuracy(model, loader):
    model.eval()
    right = total = 0
    for batch in loader:
        right += (model(batch["ids"]).argmax(-1) == batch["label"]).sum().item()
        total += len(batch["label"])
    return right / total


def make_script():
    model, optimizer, noam = build()
    return trainworthy.Script(
        model=model,
        optimizer=optimizer,
        train=train_loader,
        val=val_loader,
        loss=loss_of,
        metric=accuracy,
        train_loop=lambda model, optimizer, batches: train_epoch(model, optimizer, noam, batches),
        classes=len(PACKAGES),
        target="label",
    )


def main():
    torch.manual_seed(SEED)
    model, optimizer, noam = build()
    best, best_state, bad = 0.0, None, 0
    for epoch in range(EPOCHS):
        train_epoch(model, optimizer, noam, train_loader)
        score = accuracy(model, val_loader)
        print(f"epoch {epoch} val {score:.4f}")
        if score > best:
            best, best_state, bad = score, copy.deepcopy(model.state_dict()), 0
        else:
            bad += 1
        if bad == 2:
            break
    model.load_state_dict(best_state)
    print(f"accuracy {accuracy(model, test_loader):.4f}")


if __name__ == "__main__":
    main()
