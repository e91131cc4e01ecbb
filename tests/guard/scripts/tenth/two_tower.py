"""Two-tower retrieval: find the function whose docstring was given. In-batch softmax, recall among all functions of the test."""

import ast
import random
import re
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

SEED = 0
MAX_NAME, MAX_DOC, HASH_SIZE = 8, 24, 4096
PACKAGES = [
    ".",
    "asyncio",
    "email",
    "http",
    "json",
    "logging",
    "unittest",
    "urllib",
    "xml/dom",
    "importlib",
    "tkinter",
    "multiprocessing",
]


def stem(word: str) -> str:
    return re.sub(r"(ing|ed|es|s|e)$", "", word)


def words_of(text: str) -> list[str]:
    return [stem(w) for w in re.findall(r"[a-z]+", re.sub(r"([a-z])([A-Z])", r"\1 \2", text).lower())]


def word_id(word: str) -> int:
    """The hashing trick; 0 is padding."""
    value = 0
    for ch in word:
        value = (value * 31 + ord(ch)) % 1_000_003
    return 1 + value % (HASH_SIZE - 1)


def encode(words: list[str], length: int) -> Tensor:
    ids = [word_id(w) for w in words[:length]]
    return torch.tensor(ids + [0] * (length - len(ids)))


def read_pairs() -> list[tuple[Tensor, Tensor]]:
    """(words of the docstring's first line, words of class, function and arguments)."""
    pairs: dict[str, list[str]] = {}
    root = Path(sysconfig.get_paths()["stdlib"])
    for package in PACKAGES:
        for file in sorted((root / package).glob("*.py")):
            tree = ast.parse(file.read_text(errors="ignore"))
            owners = [(file.stem, tree)] + [(n.name, n) for n in tree.body if isinstance(n, ast.ClassDef)]
            for owner, node in owners:
                for f in node.body:
                    if isinstance(f, ast.FunctionDef) and (doc := ast.get_docstring(f)):
                        name = words_of(f"{f.name} {owner} " + " ".join(a.arg for a in f.args.args if a.arg != "self"))
                        if len(words_of(doc.split("\n\n")[0])) > 3:
                            pairs.setdefault(doc.split("\n\n")[0], name)
    rows = [(encode(words_of(doc), MAX_DOC), encode(name, MAX_NAME)) for doc, name in sorted(pairs.items())]
    random.Random(1).shuffle(rows)
    return rows


class Tower(nn.Module):
    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(HASH_SIZE, dim, padding_idx=0)
        self.weight = nn.Embedding(HASH_SIZE, 1)
        self.mlp = nn.Sequential(nn.Linear(dim, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, dim))

    def forward(self, ids: Tensor) -> Tensor:
        scores = self.weight(ids).squeeze(-1).masked_fill(ids == 0, float("-inf"))
        pooled = (scores.softmax(dim=1).unsqueeze(-1) * self.embedding(ids)).sum(dim=1)
        return F.normalize(pooled + self.mlp(pooled), dim=-1)


class TwoTower(nn.Module):
    def __init__(self, temperature: float = 0.07) -> None:
        super().__init__()
        self.query_tower, self.item_tower = Tower(), Tower()
        self.temperature = temperature

    def forward(self, query: Tensor, item: Tensor) -> Tensor:
        """Logits of every query with every item of the batch."""
        return self.query_tower(query) @ self.item_tower(item).T / self.temperature


def in_batch_loss(model: TwoTower, batch: tuple[Tensor, Tensor]) -> Tensor:
    logits = model(*batch)
    labels = torch.arange(len(logits))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def train_epoch(model: TwoTower, optimizer: torch.optim.Optimizer, loader) -> None:
    model.train()
    for batch in loader:
        loss = in_batch_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def recall_at_10(model: TwoTower, loader) -> float:
    model.eval()
    queries = torch.cat([model.query_tower(q) for q, _ in loader])
    items = torch.cat([model.item_tower(i) for _, i in loader])
    best = (queries @ items.T).topk(min(10, len(items)), dim=1).indices
    return (best == torch.arange(len(queries))[:, None]).any(dim=1).float().mean().item()


def split_pairs(rows):
    n_train = int(0.8 * len(rows))
    return rows[:n_train], rows[n_train:]


def configure_optimizer(model: TwoTower) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.05)


def make_script():
    import trainworthy

    train_rows, test_rows = split_pairs(read_pairs())
    model = TwoTower()
    return trainworthy.Script(
        model=model,
        optimizer=configure_optimizer(model),
        train=train_rows,
        val=test_rows,
        batch_size=64,
        loss=in_batch_loss,
        metric=recall_at_10,
        train_loop=train_epoch,
        target="1",
        batch_dependence="the other items of the batch are the negatives",
        floor=10 / len(test_rows),
    )


def main() -> None:
    torch.manual_seed(SEED)
    random.seed(SEED)
    train_rows, test_rows = split_pairs(read_pairs())
    print(len(train_rows), "training pairs,", len(test_rows), "test pairs")
    train_loader = DataLoader(train_rows, batch_size=64, shuffle=True, drop_last=True)
    test_loader = DataLoader(test_rows, batch_size=256)
    model = TwoTower()
    optimizer = configure_optimizer(model)
    for epoch in range(8):
        train_epoch(model, optimizer, train_loader)
        print(f"epoch {epoch}: recall@10 {recall_at_10(model, test_loader):.4f}")
    print(f"FINAL recall10={recall_at_10(model, test_loader):.4f}")


if __name__ == "__main__":
    main()
