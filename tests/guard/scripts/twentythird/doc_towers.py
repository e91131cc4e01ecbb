"""Two towers, as in CLIP: the name of a function and the first line of its docstring, from the sources of installed packages."""

import os
import pathlib
import random
import re

import numpy
import scipy
import sklearn
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import trainworthy

SEED = int(os.environ.get("SEED", "0"))
BUCKETS, WIDTH = 5000, 96
DOCSTRING = re.compile(
    r'^ *(?:def|class) (\w+)[^\n]*(?:\n(?! *(?:def|class) )[^\n"]*)*?\n *r?"""([^\n"]{20,})', re.MULTILINE
)


def read_pairs():
    """One (name, first line of the docstring) for each function; names and lines that occur twice are left out."""
    pairs, names, lines = [], set(), set()
    for package in (sklearn, scipy, numpy):
        for path in sorted(pathlib.Path(package.__file__).parent.rglob("*.py")):
            if "tests" in path.parts:
                continue
            for name, line in DOCSTRING.findall(path.read_text(encoding="utf-8")):
                if len(name) < 6 or name in names or line in lines:
                    continue
                names.add(name)
                lines.add(line)
                pairs.append((name, line))
    return pairs


def trigrams(text):
    words = re.findall(r"[a-z]+|\d+", re.sub(r"([a-z])([A-Z])", r"\1 \2", text).lower())
    grams = [f"#{w}#"[i : i + 3] for w in words for i in range(len(w))]
    return [sum(ord(c) * 31**k for k, c in enumerate(g)) % BUCKETS for g in grams] or [0]


class Pairs(Dataset):
    def __init__(self, pairs):
        self.items = [(trigrams(name), trigrams(line)) for name, line in pairs]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def bag(lists):
    offsets = torch.tensor([0] + [len(ids) for ids in lists[:-1]]).cumsum(0)
    return torch.tensor([i for ids in lists for i in ids]), offsets


def collate(items):
    names, lines = zip(*items)
    return *bag(names), *bag(lines)


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.EmbeddingBag(BUCKETS, WIDTH, mode="mean")
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, 64))

    def forward(self, ids, offsets):
        return F.normalize(self.head(self.embed(ids, offsets)), dim=-1)


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.name_tower, self.line_tower = Tower(), Tower()
        self.logit_scale = nn.Parameter(torch.tensor(10.0).log())

    def forward(self, name_ids, name_offsets, line_ids, line_offsets):
        names = self.name_tower(name_ids, name_offsets)
        lines = self.line_tower(line_ids, line_offsets)
        return names, lines, self.logit_scale.exp().clamp(max=100)


def clip_loss(names, lines, scale):
    logits = scale * names @ lines.T
    labels = torch.arange(len(logits))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


class Trainer:
    def __init__(self, model, train_set, test_set, epochs=5, batch_size=128, lr=3e-3, weight_decay=0.05):
        self.model, self.epochs = model, epochs
        self.loader = DataLoader(train_set, batch_size, shuffle=True, drop_last=True, collate_fn=collate)
        self.test_loader = DataLoader(test_set, 256, collate_fn=collate)
        decay = [p for p in model.parameters() if p.ndim > 1]
        rest = [p for p in model.parameters() if p.ndim <= 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": decay, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}], lr=lr
        )
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, lr, total_steps=epochs * len(self.loader))

    def train_epoch(self, loader):
        self.model.train()
        for batch in loader:
            loss = clip_loss(*self.model(*batch))
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.schedule.step()

    @torch.no_grad()
    def recall(self, k=5):
        """Share of the names whose own line is among the k nearest of all held-out lines."""
        self.model.eval()
        names, lines = zip(*[self.model(*batch)[:2] for batch in self.test_loader])
        nearest = (torch.cat(names) @ torch.cat(lines).T).topk(k, dim=1).indices
        return (nearest == torch.arange(len(nearest))[:, None]).any(1).float().mean().item()


def build():
    pairs = read_pairs()
    random.Random(5).shuffle(pairs)
    return Trainer(Towers(), Pairs(pairs[600:]), Pairs(pairs[:600]))


def make_loop():
    trainer = build()
    return trainworthy.Loop(
        models=trainer.model,
        optimizers=trainer.optimizer,
        batches=trainer.loader,
        run=trainer.train_epoch,
        evaluate=trainer.recall,
    )


def main():
    torch.manual_seed(SEED)
    trainer = build()
    for epoch in range(trainer.epochs):
        trainer.train_epoch(trainer.loader)
        print(f"epoch {epoch} recall@5 {trainer.recall():.3f}")
    print(f"recall@5 {trainer.recall():.4f}")


if __name__ == "__main__":
    main()
