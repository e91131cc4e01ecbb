"""The shape of pytorch/examples word_language_model: time-major chunks, carried hidden state, plain SGD by annealing, no DataLoader."""

import argparse as source
import math

import torch
from torch import nn

torch.manual_seed(1111)
text = open(source.__file__).read()[:60000].split()
words = sorted(set(text))
index = {w: i for i, w in enumerate(words)}
ids = torch.tensor([index[w] for w in text])


def batchify(data, bsz):
    nbatch = data.size(0) // bsz
    return data[: nbatch * bsz].view(bsz, -1).t().contiguous()


train_data, val_data = batchify(ids[:-1000], 8), batchify(ids[-1000:], 4)
bptt, ntokens = 12, len(words)


class RNNModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.2)
        self.encoder = nn.Embedding(ntokens, 32)
        self.rnn = nn.LSTM(32, 32, 1)
        self.decoder = nn.Linear(32, ntokens)

    def forward(self, input, hidden):
        emb = self.drop(self.encoder(input))
        output, hidden = self.rnn(emb, hidden)
        return self.decoder(self.drop(output)).view(-1, ntokens), hidden

    def init_hidden(self, bsz):
        return torch.zeros(1, bsz, 32), torch.zeros(1, bsz, 32)


model = RNNModel()
criterion = nn.CrossEntropyLoss()


def get_batch(source, i):
    seq_len = min(bptt, len(source) - 1 - i)
    return source[i : i + seq_len], source[i + 1 : i + 1 + seq_len].view(-1)


def evaluate(data_source):
    model.eval()
    total_loss = 0.0
    hidden = model.init_hidden(data_source.size(1))
    with torch.no_grad():
        for i in range(0, data_source.size(0) - 1, bptt):
            data, targets = get_batch(data_source, i)
            output, hidden = model(data, hidden)
            total_loss += len(data) * criterion(output, targets).item()
    return total_loss / (len(data_source) - 1)


def train(lr):
    model.train()
    hidden = model.init_hidden(8)
    for i in range(0, train_data.size(0) - 1, bptt):
        data, targets = get_batch(train_data, i)
        optimizer.zero_grad()
        hidden = tuple(h.detach() for h in hidden)
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()


lr, best_val_loss = 20.0, None
optimizer = torch.optim.SGD(model.parameters(), lr=lr)
for epoch in range(1, 7):
    train(lr)
    val_loss = evaluate(val_data)
    print(f"| end of epoch {epoch} | valid loss {val_loss:5.2f} | valid ppl {math.exp(val_loss):8.2f}")
    if not best_val_loss or val_loss < best_val_loss:
        with open("model.pt", "wb") as f:
            torch.save(model, f)
        best_val_loss = val_loss
    else:
        for group in optimizer.param_groups:
            group["lr"] /= 4.0
