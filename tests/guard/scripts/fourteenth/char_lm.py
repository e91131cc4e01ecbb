"""Character language model: a GRU on Python's manual. Reports perplexity per character on the last tenth."""

import argparse
import math
import pydoc_data.topics

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--warmup", type=int, default=30, help="optimiser steps")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="/tmp/char_lm.pt")
    return parser.parse_args()


class Corpus:
    def __init__(self, limit=200_000):
        text = "\n".join(pydoc_data.topics.topics[k] for k in sorted(pydoc_data.topics.topics))[:limit]
        self.chars = sorted(set(text))
        self.stoi = {c: i for i, c in enumerate(self.chars)}
        ids = torch.tensor([self.stoi[c] for c in text])
        cut = int(0.9 * len(ids))
        self.train, self.valid = ids[:cut], ids[cut:]


class Blocks(Dataset):
    """Consecutive blocks of a text; the target is the next character at each place."""

    def __init__(self, ids, block):
        self.ids, self.block = ids, block

    def __len__(self):
        return (len(self.ids) - 1) // self.block

    def __getitem__(self, index):
        start = index * self.block
        chunk = self.ids[start : start + self.block + 1]
        return chunk[:-1], chunk[1:]


class CharGRU(nn.Module):
    def __init__(self, vocab_size, hidden):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, 64)
        self.gru = nn.GRU(64, hidden, num_layers=1, batch_first=True)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(hidden, vocab_size)

    def forward(self, x):
        out, _ = self.gru(self.embedding(x))
        return self.head(self.drop(out))


def loss_fn(logits, targets):
    return F.cross_entropy(logits.reshape(-1, logits.size(-1)), targets.reshape(-1))


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    total, batches = 0.0, 0
    for x, y in loader:
        total += loss_fn(model(x), y).item()
        batches += 1
    return math.exp(total / batches)


@torch.no_grad()
def sample(model, corpus, prompt="The ", length=60):
    model.eval()
    ids = torch.tensor([[corpus.stoi[c] for c in prompt]])
    for _ in range(length):
        probs = F.softmax(model(ids)[:, -1] / 0.8, dim=-1)
        ids = torch.cat([ids, torch.multinomial(probs, 1)], dim=1)
    return "".join(corpus.chars[i] for i in ids[0])


def train(model, train_loader, valid_loader, corpus, args):
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    total_steps = args.epochs * len(train_loader)

    def rate(step):
        if step < args.warmup:
            return (step + 1) / args.warmup
        return 0.5 * (1 + math.cos(math.pi * (step - args.warmup) / max(1, total_steps - args.warmup)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    perplexity = float("inf")
    for epoch in range(args.epochs):
        model.train()
        for step, (x, y) in enumerate(train_loader):
            loss = loss_fn(model(x), y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            if step % 50 == 0:
                print(f"  step {step} loss {loss.item():.3f}")
        perplexity = evaluate(model, valid_loader)
        print(f"epoch {epoch}: valid perplexity {perplexity:.3f}")
        print("   ", repr(sample(model, corpus)))
        torch.save({"model": model.state_dict(), "chars": corpus.chars}, args.out)
    return perplexity


def main():
    args = get_args()
    torch.manual_seed(args.seed)
    corpus = Corpus()
    train_loader = DataLoader(Blocks(corpus.train, args.block), batch_size=args.batch, shuffle=True)
    valid_loader = DataLoader(Blocks(corpus.valid, args.block), batch_size=64)
    model = CharGRU(len(corpus.chars), args.hidden)
    print(f"FINAL perplexity={train(model, train_loader, valid_loader, corpus, args):.4f}")


if __name__ == "__main__":
    main()
