"""Written dates ("3 Mar 98", "Mar 03, 1998") into ISO dates, with a small encoder-decoder transformer and greedy decoding."""

import datetime
import math
import os
import random

import torch
from torch import nn

PAD, BOS, EOS = 0, 1, 2
ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789 ,./-"
STOI = {c: i + 3 for i, c in enumerate(ALPHABET)}
FORMATS = ["%d %b %y", "%b %d, %Y", "%d/%m/%Y"]
STEPS, BATCH, WARMUP = 600, 48, 100


def encode(text):
    return [STOI[c] for c in text.lower()]


def pad(rows):
    width = max(map(len, rows))
    return torch.tensor([row + [PAD] * (width - len(row)) for row in rows])


def make_pairs(n, rng):
    first = datetime.date(1970, 1, 1)
    dates = [first + datetime.timedelta(days=d) for d in rng.sample(range(20000), n)]
    sources = pad([encode(d.strftime(rng.choice(FORMATS))) for d in dates])
    targets = pad([[BOS] + encode(d.isoformat()) + [EOS] for d in dates])
    return sources, targets


class PositionalEncoding(nn.Module):
    def __init__(self, dim, max_len=5000):
        super().__init__()
        position = torch.arange(max_len).unsqueeze(1)
        div = torch.exp(torch.arange(0, dim, 2) * (-math.log(10000.0) / dim))
        table = torch.zeros(max_len, dim)
        table[:, 0::2] = torch.sin(position * div)
        table[:, 1::2] = torch.cos(position * div)
        self.register_buffer("table", table)

    def forward(self, x):
        return x + self.table[: x.size(1)]


class Seq2Seq(nn.Module):
    def __init__(self, vocab, dim=64, heads=4, layers=2):
        super().__init__()
        self.dim = dim
        self.src_embed = nn.Embedding(vocab, dim, padding_idx=PAD)
        self.tgt_embed = nn.Embedding(vocab, dim, padding_idx=PAD)
        self.position = PositionalEncoding(dim)
        self.transformer = nn.Transformer(
            dim, heads, layers, 1, 4 * dim, dropout=0.0, batch_first=True, norm_first=True
        )
        self.generator = nn.Linear(dim, vocab)

    def encode(self, src):
        x = self.position(self.src_embed(src) * math.sqrt(self.dim))
        return self.transformer.encoder(x, src_key_padding_mask=src == PAD)

    def decode(self, tgt, memory, src):
        causal = nn.Transformer.generate_square_subsequent_mask(tgt.size(1), dtype=torch.bool)
        x = self.position(self.tgt_embed(tgt) * math.sqrt(self.dim))
        x = self.transformer.decoder(x, memory, tgt_mask=causal, memory_key_padding_mask=src == PAD)
        return self.generator(x)

    def forward(self, src, tgt):
        return self.decode(tgt, self.encode(src), src)


@torch.no_grad()
def greedy_decode(model, src, max_len=12):
    memory = model.encode(src)
    out = torch.full((len(src), 1), BOS)
    for _ in range(max_len - 1):
        token = model.decode(out, memory, src)[:, -1].argmax(-1)
        out = torch.cat([out, token[:, None]], dim=1)
    return out


def exact_match(model, src, tgt):
    model.eval()
    decoded = greedy_decode(model, src, tgt.size(1))
    return (decoded == tgt).all(1).float().mean().item()


def main():
    seed = int(os.environ.get("SEED", "0"))
    torch.manual_seed(seed)
    sources, targets = make_pairs(6000, random.Random(seed))
    order = torch.randperm(len(sources))
    train, test = order[:5500], order[5500:]
    model = Seq2Seq(len(ALPHABET) + 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min((s + 1) / WARMUP, math.sqrt(WARMUP / (s + 1)))
    )
    criterion = nn.CrossEntropyLoss(ignore_index=PAD, label_smoothing=0.05)
    for step in range(STEPS):
        model.train()
        rows = train[torch.randint(len(train), (BATCH,))]
        src, tgt = sources[rows], targets[rows]
        logits = model(src, tgt[:, :-1])
        loss = criterion(logits.transpose(1, 2), tgt[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if (step + 1) % 100 == 0:
            match = exact_match(model, sources[test[:200]], targets[test[:200]])
            print(f"step {step + 1} loss {loss.item():.3f} match {match:.3f}", flush=True)
    print(f"exact_match {exact_match(model, sources[test], targets[test]):.4f}")


if __name__ == "__main__":
    main()
