"""Which library is this docstring from? A transformer encoder over words, with a trainer class and early stopping."""

import copy
import math
import os
import random
import re
from collections import Counter
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

LIBRARIES = ["sklearn", "scipy", "pandas", "networkx", "torch", "matplotlib"]
PAD, UNK, CLS = 0, 1, 2


@dataclass
class Config:
    dim: int = 96
    max_len: int = 48
    batch_size: int = 32
    lr: float = 1e-3
    warmup: int = 50
    epochs: int = 8
    patience: int = 2


def read_docstrings(per_library=450):
    rows = []
    for label, name in enumerate(LIBRARIES):
        found = []
        for file in sorted(Path(find_spec(name).origin).parent.rglob("*.py")):
            if "tests" in file.parts or len(found) >= 4 * per_library:
                continue
            for text in re.findall(r'"""(.+?)"""', file.read_text(errors="ignore"), re.S):
                words = re.findall(r"[a-z]+|[^\sa-z]", text.lower().replace(name, ""))
                if len(words) >= 8:
                    found.append((words, label))
        random.shuffle(found)
        rows += found[:per_library]
    random.shuffle(rows)
    return rows


class Encoder(nn.Module):
    def __init__(self, cfg, n_words):
        super().__init__()
        self.embed = nn.Embedding(n_words, cfg.dim, padding_idx=PAD)
        self.position = nn.Embedding(cfg.max_len, cfg.dim)
        layer = nn.TransformerEncoderLayer(cfg.dim, 4, 2 * cfg.dim, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(cfg.dim), enable_nested_tensor=False)
        self.head = nn.Linear(cfg.dim, len(LIBRARIES))

    def forward(self, tokens):
        padding = tokens == PAD
        x = self.embed(tokens) * math.sqrt(self.embed.embedding_dim) + self.position.weight[: tokens.size(1)]
        x = self.encoder(x, src_key_padding_mask=padding)
        kept = (~padding).unsqueeze(-1).float()
        return self.head((x * kept).sum(1) / kept.sum(1))


class Trainer:
    def __init__(self, cfg, model, train_loader, val_loader):
        self.cfg, self.model, self.train_loader, self.val_loader = cfg, model, train_loader, val_loader
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr, weight_decay=0.01)
        total = cfg.epochs * len(train_loader)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda s: min((s + 1) / cfg.warmup, 0.5 * (1 + math.cos(math.pi * min(1, s / total))))
        )
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.05)

    def train_epoch(self):
        self.model.train()
        for tokens, labels in self.train_loader:
            self.optimizer.zero_grad()
            loss = self.criterion(self.model(tokens), labels)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.scheduler.step()

    @torch.no_grad()
    def evaluate(self, loader):
        self.model.eval()
        right = sum((self.model(tokens).argmax(-1) == labels).sum().item() for tokens, labels in loader)
        return right / len(loader.dataset)

    def fit(self):
        best, state, bad = 0.0, None, 0
        for epoch in range(self.cfg.epochs):
            self.train_epoch()
            accuracy = self.evaluate(self.val_loader)
            print(f"epoch {epoch} val accuracy {accuracy:.3f}", flush=True)
            if accuracy > best:
                best, state, bad = accuracy, copy.deepcopy(self.model.state_dict()), 0
            elif (bad := bad + 1) >= self.cfg.patience:
                break
        self.model.load_state_dict(state)


def main():
    cfg, seed = Config(), int(os.environ.get("SEED", "0"))
    random.seed(seed)
    torch.manual_seed(seed)
    rows = read_docstrings()
    a, b = int(0.7 * len(rows)), int(0.8 * len(rows))
    train, val, test = rows[:a], rows[a:b], rows[b:]
    counts = Counter(word for words, _ in train for word in words)
    vocab = {word: i + 3 for i, (word, _) in enumerate(counts.most_common(4000))}

    def collate(batch):
        ids = [torch.tensor([CLS] + [vocab.get(w, UNK) for w in words])[: cfg.max_len] for words, _ in batch]
        return pad_sequence(ids, batch_first=True, padding_value=PAD), torch.tensor([label for _, label in batch])

    train_loader = DataLoader(train, cfg.batch_size, shuffle=True, collate_fn=collate)
    trainer = Trainer(cfg, Encoder(cfg, len(vocab) + 3), train_loader, DataLoader(val, 64, collate_fn=collate))
    trainer.fit()
    print(f"accuracy {trainer.evaluate(DataLoader(test, 64, collate_fn=collate)):.4f}")


if __name__ == "__main__":
    main()
