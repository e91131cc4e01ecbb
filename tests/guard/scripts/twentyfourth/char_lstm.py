"""A char-level LSTM language model of Python's standard library, trained with truncated backpropagation through time."""

import argparse
import math
import os
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

FILES = ["argparse.py", "tarfile.py", "inspect.py", "typing.py", "subprocess.py", "zipfile.py", "textwrap.py", "ast.py"]


def load_corpus():
    root = Path(sysconfig.get_paths()["stdlib"])
    text = "\n".join((root / name).read_text() for name in FILES if (root / name).exists())
    chars = sorted(set(text))
    stoi = {c: i for i, c in enumerate(chars)}
    ids = torch.tensor([stoi[c] for c in text])
    cut = int(0.9 * len(ids))
    return ids[:cut], ids[cut:], len(chars)


def batchify(ids, batch_size):
    """Cut the text into `batch_size` long streams: (time, batch)."""
    n = len(ids) // batch_size
    return ids[: n * batch_size].view(batch_size, n).t().contiguous()


def get_window(source, i, bptt):
    length = min(bptt, len(source) - 1 - i)
    return source[i : i + length], source[i + 1 : i + 1 + length]


class CharLSTM(nn.Module):
    def __init__(self, n_chars, emb=48, hidden=160, dropout=0.1):
        super().__init__()
        self.embed = nn.Embedding(n_chars, emb)
        self.lstm = nn.LSTM(emb, hidden)
        self.drop = nn.Dropout(dropout)
        self.decoder = nn.Linear(hidden, n_chars)
        self.hidden = hidden

    def init_state(self, batch_size):
        weight = next(self.parameters())
        return weight.new_zeros(1, batch_size, self.hidden), weight.new_zeros(1, batch_size, self.hidden)

    def forward(self, x, state):
        out, state = self.lstm(self.drop(self.embed(x)), state)
        return self.decoder(self.drop(out)), state


def repackage(state):
    return tuple(s.detach() for s in state)


@torch.no_grad()
def evaluate(model, source, bptt):
    model.eval()
    state = model.init_state(source.size(1))
    total, count = 0.0, 0
    for i in range(0, len(source) - 1, bptt):
        x, y = get_window(source, i, bptt)
        logits, state = model(x, state)
        total += F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum").item()
        count += y.numel()
    return total / count / math.log(2)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--bptt", type=int, default=50)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--clip", type=float, default=1.0)
    args = parser.parse_args()
    torch.manual_seed(int(os.environ.get("SEED", "0")))

    train_ids, val_ids, n_chars = load_corpus()
    train_data, val_data = batchify(train_ids, args.batch_size), batchify(val_ids, 10)
    model = CharLSTM(n_chars)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    for epoch in range(args.epochs):
        model.train()
        state = model.init_state(args.batch_size)
        running = 0.0
        for step, i in enumerate(range(0, len(train_data) - 1, args.bptt)):
            x, y = get_window(train_data, i, args.bptt)
            state = repackage(state)
            logits, state = model(x, state)
            loss = F.cross_entropy(logits.reshape(-1, n_chars), y.reshape(-1))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            optimizer.step()
            running += loss.item()
        scheduler.step()
        bits = evaluate(model, val_data, args.bptt)
        print(f"epoch {epoch} train {running / (step + 1) / math.log(2):.3f} val {bits:.3f}", flush=True)
    print(f"bits_per_char {bits:.4f}")


if __name__ == "__main__":
    main()
