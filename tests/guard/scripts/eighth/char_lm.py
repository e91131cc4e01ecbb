"""Character-level LSTM on the sources of Python's library, after the word language model of the tutorials: batchify, truncated BPTT, perplexity."""

import argparse
import inspect
import math
import subprocess
import threading

import torch
import torch.nn as nn

parser = argparse.ArgumentParser()
parser.add_argument("--emsize", type=int, default=32)
parser.add_argument("--nhid", type=int, default=128)
parser.add_argument("--dropout", type=float, default=0.1)
parser.add_argument("--lr", type=float, default=3e-3)
parser.add_argument("--clip", type=float, default=0.5)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--bptt", type=int, default=40)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()
torch.manual_seed(args.seed)

text = (
    inspect.getsource(subprocess)
    + inspect.getsource(threading)
    + inspect.getsource(inspect)
    + inspect.getsource(argparse)
)
chars = sorted(set(text))
stoi = {c: i for i, c in enumerate(chars)}
corpus = torch.tensor([stoi[c] for c in text])
cut = int(0.9 * len(corpus))


def batchify(data, bsz):
    nbatch = data.size(0) // bsz
    data = data.narrow(0, 0, nbatch * bsz)
    return data.view(bsz, -1).t().contiguous()


train_data = batchify(corpus[:cut], args.batch_size)
val_data = batchify(corpus[cut:], 10)


def get_batch(source, i):
    seq_len = min(args.bptt, len(source) - 1 - i)
    return source[i : i + seq_len], source[i + 1 : i + 1 + seq_len].reshape(-1)


class RNNModel(nn.Module):
    def __init__(self, ntoken, ninp, nhid, dropout):
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnn = nn.LSTM(ninp, nhid)
        self.decoder = nn.Linear(nhid, ntoken)
        self.nhid = nhid

    def forward(self, input, hidden):
        emb = self.drop(self.encoder(input))
        output, hidden = self.rnn(emb, hidden)
        decoded = self.decoder(self.drop(output))
        return decoded.view(-1, decoded.size(-1)), hidden

    def init_hidden(self, bsz):
        return torch.zeros(1, bsz, self.nhid), torch.zeros(1, bsz, self.nhid)


def repackage_hidden(h):
    return tuple(v.detach() for v in h)


model = RNNModel(len(chars), args.emsize, args.nhid, args.dropout)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)


def evaluate(source):
    model.eval()
    total = 0.0
    hidden = model.init_hidden(10)
    with torch.no_grad():
        for i in range(0, source.size(0) - 1, args.bptt):
            data, targets = get_batch(source, i)
            output, hidden = model(data, hidden)
            total += len(data) * criterion(output, targets).item()
    return total / (len(source) - 1)


def train():
    model.train()
    total, n = 0.0, 0
    hidden = model.init_hidden(args.batch_size)
    for i in range(0, train_data.size(0) - 1, args.bptt):
        data, targets = get_batch(train_data, i)
        hidden = repackage_hidden(hidden)
        optimizer.zero_grad()
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        total, n = total + loss.item(), n + 1
    return total / n


for epoch in range(1, args.epochs + 1):
    train_loss = train()
    val_loss = evaluate(val_data)
    print(
        f"| end of epoch {epoch:3d} | train loss {train_loss:5.3f} | valid loss {val_loss:5.3f} | valid ppl {math.exp(val_loss):8.3f}"
    )

print(f"FINAL loss={val_loss:.4f}")
