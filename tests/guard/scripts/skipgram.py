"""word2vec: skip-gram with negative sampling and subsampling on the texts of Python's help()."""

import argparse
import re
from collections import Counter
from pydoc_data.topics import topics

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


def tokenize():
    text = "\n".join(topics[name] for name in sorted(topics)).lower()
    return re.findall(r"[a-z_]+", text)


class Vocab:
    def __init__(self, tokens, min_count):
        counts = Counter(tokens)
        self.itos = [w for w, c in counts.most_common() if c >= min_count]
        self.stoi = {w: i for i, w in enumerate(self.itos)}
        self.freqs = np.array([counts[w] for w in self.itos], dtype=np.float64)

    def __len__(self):
        return len(self.itos)


class SkipGramDataset(Dataset):
    def __init__(self, ids, window, rng):
        pairs = []
        for i, center in enumerate(ids):
            size = rng.integers(1, window + 1)
            for j in range(max(0, i - size), min(len(ids), i + size + 1)):
                if j != i:
                    pairs.append((center, ids[j]))
        self.pairs = np.array(pairs, dtype=np.int64)

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, i):
        return self.pairs[i]


class SkipGram(nn.Module):
    def __init__(self, vocab_size, dim):
        super().__init__()
        self.in_embed = nn.Embedding(vocab_size, dim)
        self.out_embed = nn.Embedding(vocab_size, dim)
        nn.init.uniform_(self.in_embed.weight, -0.5 / dim, 0.5 / dim)
        nn.init.zeros_(self.out_embed.weight)

    def forward(self, center, context, negatives):
        v = self.in_embed(center)
        u = self.out_embed(context)
        n = self.out_embed(negatives)
        pos = (v * u).sum(1)
        neg = torch.bmm(n, v.unsqueeze(2)).squeeze(2)
        return -(F.logsigmoid(pos) + F.logsigmoid(-neg).sum(1)).mean()

    def score(self, center, context):
        return (self.in_embed(center) * self.out_embed(context)).sum(1)


@torch.no_grad()
def ranking(model, pairs, noise):
    """How often a true context scores above a random word."""
    pairs = torch.from_numpy(pairs)
    rand = torch.multinomial(noise, len(pairs), replacement=True)
    better = model.score(pairs[:, 0], pairs[:, 1]) > model.score(pairs[:, 0], rand)
    return better.float().mean().item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--dim", type=int, default=48)
    p.add_argument("--window", type=int, default=4)
    p.add_argument("--negatives", type=int, default=5)
    p.add_argument("--batch-size", type=int, default=1024)
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--lr", type=float, default=1e-2)
    args = p.parse_args()

    torch.manual_seed(1)
    rng = np.random.default_rng(1)
    tokens = tokenize()
    vocab = Vocab(tokens, min_count=5)
    ids = np.array([vocab.stoi[t] for t in tokens if t in vocab.stoi])
    share = vocab.freqs / vocab.freqs.sum()
    keep = np.minimum(1, np.sqrt(1e-3 / share))
    chunks = [part[rng.random(len(part)) < keep[part]] for part in np.array_split(ids, 200)]
    train, held = np.concatenate(chunks[::2] + chunks[1::4]), np.concatenate(chunks[3::4])
    noise = torch.from_numpy(share**0.75 / (share**0.75).sum())
    dataset = SkipGramDataset(train, args.window, rng)
    test = SkipGramDataset(held, args.window, rng).pairs
    loader = DataLoader(dataset, batch_size=args.batch_size, shuffle=True, drop_last=True)
    print(f"{len(vocab)} words, {len(dataset)} pairs")

    model = SkipGram(len(vocab), args.dim)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        total = 0
        for step, batch in enumerate(loader):
            center, context = batch[:, 0], batch[:, 1]
            negatives = torch.multinomial(noise, len(center) * args.negatives, replacement=True)
            loss = model(center, context, negatives.view(len(center), -1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
            if step % 100 == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.3f}")
        print(f"epoch {epoch}: loss {total / len(loader):.3f} ranking {ranking(model, test, noise):.3f}")
    np.save("vectors.npy", model.in_embed.weight.detach().numpy())


if __name__ == "__main__":
    main()
