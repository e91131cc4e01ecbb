"""makemore with causal convolutions: a character model of Python's identifiers."""

import random
import sys
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

SEED = 0


@dataclass
class Config:
    block_size: int = 20
    n_layer: int = 4
    n_embd: int = 64
    kernel: int = 3
    batch_size: int = 32
    max_steps: int = 500
    learning_rate: float = 3e-3
    weight_decay: float = 0.01


def load_words(block_size):
    words = set()
    for name in ["os", "socket", "ssl", "tkinter", "ast", "typing", "inspect", "unittest", "logging", "email", "http.client",
                 "decimal", "subprocess", "asyncio", "threading", "argparse", "datetime", "random", "math", "collections",
                 "itertools", "errno", "signal", "stat", "select", "curses", "xml.dom", "json", "pickle", "shutil"]:  # fmt: skip
        try:
            __import__(name)
        except ImportError:
            continue
        module = sys.modules[name]
        for attr in dir(module):
            words.add(attr.lower().strip("_"))
            words.update(a.lower().strip("_") for a in dir(getattr(module, attr, None)))
    return sorted(w for w in words if 2 < len(w) < block_size and w.isascii())


class CharDataset(Dataset):
    def __init__(self, words, chars, max_word_length):
        self.words, self.chars, self.max_word_length = words, chars, max_word_length
        self.stoi = {ch: i + 1 for i, ch in enumerate(chars)}

    def __len__(self):
        return len(self.words)

    def get_vocab_size(self):
        return len(self.chars) + 1  # 0 is start, stop and padding

    def get_output_length(self):
        return self.max_word_length + 1

    def __getitem__(self, idx):
        ix = torch.tensor([self.stoi[ch] for ch in self.words[idx]], dtype=torch.long)
        x = torch.zeros(self.max_word_length + 1, dtype=torch.long)
        y = torch.zeros(self.max_word_length + 1, dtype=torch.long)
        x[1 : 1 + len(ix)] = ix
        y[: len(ix)] = ix
        y[len(ix) + 1 :] = -1  # index -1 is not scored
        return x, y


class Block(nn.Module):
    def __init__(self, config, dilation):
        super().__init__()
        self.pad = (config.kernel - 1) * dilation
        self.conv = nn.Conv1d(config.n_embd, 2 * config.n_embd, config.kernel, dilation=dilation)
        self.proj = nn.Conv1d(config.n_embd, config.n_embd, 1)

    def forward(self, x):
        h = self.conv(F.pad(x, (self.pad, 0)))
        return x + self.proj(F.glu(h, dim=1))


class TCN(nn.Module):
    def __init__(self, config, vocab_size):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, config.n_embd)
        self.blocks = nn.Sequential(*[Block(config, 2**i) for i in range(config.n_layer)])
        self.head = nn.Conv1d(config.n_embd, vocab_size, 1)

    def forward(self, idx, targets=None):
        x = self.wte(idx).transpose(1, 2)
        logits = self.head(self.blocks(x))  # (B, V, T)
        loss = None
        if targets is not None:
            loss = F.cross_entropy(
                logits.transpose(1, 2).reshape(-1, logits.size(1)), targets.reshape(-1), ignore_index=-1
            )
        return logits, loss


def create_datasets(config):
    words = load_words(config.block_size)
    chars = sorted(set("".join(words)))
    random.Random(SEED).shuffle(words)
    n_test = len(words) // 5
    train_words, test_words = words[:-n_test], words[-n_test:]
    print(f"{len(train_words)} training words, {len(test_words)} test words")
    return CharDataset(train_words, chars, config.block_size), CharDataset(test_words, chars, config.block_size)


@torch.inference_mode()
def evaluate(model, loader):
    """Nats a character."""
    model.eval()
    nll = count = 0
    for x, y in loader:
        n = (y != -1).sum().item()
        nll += model(x, y)[1].item() * n
        count += n
    model.train()
    return nll / count


@torch.inference_mode()
def sample(model, dataset, n=8):
    model.eval()
    idx = torch.zeros(n, 1, dtype=torch.long)
    for _ in range(dataset.max_word_length):
        probs = F.softmax(model(idx)[0][:, :, -1], dim=-1)
        idx = torch.cat([idx, torch.multinomial(probs, 1)], dim=1)
    model.train()
    itos = {i: ch for ch, i in dataset.stoi.items()}
    return ["".join(itos[i] for i in row[1:] if i) for row in idx.tolist()]


def train_steps(model, optimizer, batches, max_steps=None):
    model.train()
    for step, (x, y) in enumerate(batches):
        _, loss = model(x, y)
        model.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if max_steps and step + 1 >= max_steps:
            break


def forever(loader):
    while True:
        yield from loader


def make_optimizer(model, config):
    return torch.optim.AdamW(
        model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay, betas=(0.9, 0.99)
    )


def make_script():
    import trainworthy

    config = Config()
    train_set, test_set = create_datasets(config)
    model = TCN(config, train_set.get_vocab_size())
    return trainworthy.Script(
        model=model,
        optimizer=make_optimizer(model, config),
        train=train_set,
        val=test_set,
        batch_size=config.batch_size,
        loss=lambda model, batch: model(batch[0], batch[1])[1],
        metric=evaluate,
        train_loop=train_steps,
        classes=train_set.get_vocab_size(),
        count=lambda batch: (batch[1] != -1).sum().item(),
        higher_is_better=False,
        floor=3.3,
    )


def main():
    torch.manual_seed(SEED)
    config = Config()
    train_set, test_set = create_datasets(config)
    model = TCN(config, train_set.get_vocab_size())
    optimizer = make_optimizer(model, config)
    batches = forever(DataLoader(train_set, config.batch_size, shuffle=True))
    for phase in range(5):
        train_steps(model, optimizer, batches, config.max_steps // 5)
        print(f"step {(phase + 1) * config.max_steps // 5}: test loss {evaluate(model, DataLoader(test_set, 256)):.4f}")
        print("  ", ", ".join(sample(model, train_set)))
    print(f"FINAL nll={evaluate(model, DataLoader(test_set, 256)):.4f}")
    return model, test_set


if __name__ == "__main__":
    main()
