"""Word language model on Python's manual: an LSTM with weight drop and locked dropout, in the style of awd-lstm-lm."""

import argparse
import copy
import math
import re
from collections import Counter
from pydoc_data.topics import topics

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser(description="PyTorch RNN/LSTM Language Model")
parser.add_argument("--emsize", type=int, default=64, help="size of word embeddings")
parser.add_argument("--nhid", type=int, default=128, help="number of hidden units per layer")
parser.add_argument("--nlayers", type=int, default=2, help="number of layers")
parser.add_argument("--lr", type=float, default=10, help="initial learning rate")
parser.add_argument("--clip", type=float, default=0.25, help="gradient clipping")
parser.add_argument("--epochs", type=int, default=6, help="upper epoch limit")
parser.add_argument("--batch_size", type=int, default=20, help="batch size")
parser.add_argument("--bptt", type=int, default=30, help="sequence length")
parser.add_argument("--dropout", type=float, default=0.2, help="dropout applied to layers")
parser.add_argument("--wdrop", type=float, default=0.1, help="weight dropout on the hidden to hidden matrix")
parser.add_argument("--alpha", type=float, default=0.0, help="activation regularization")
parser.add_argument("--beta", type=float, default=0.0, help="temporal activation regularization")
parser.add_argument("--wdecay", type=float, default=1.2e-6, help="weight decay applied to all weights")
parser.add_argument("--words", type=int, default=60000, help="words of the text that are used")
parser.add_argument("--seed", type=int, default=0, help="random seed")
args = parser.parse_args()

np.random.seed(args.seed)
torch.manual_seed(args.seed)


class Dictionary:
    def __init__(self):
        self.word2idx = {}
        self.idx2word = []

    def add_word(self, word):
        if word not in self.word2idx:
            self.idx2word.append(word)
            self.word2idx[word] = len(self.idx2word) - 1
        return self.word2idx[word]


class Corpus:
    def __init__(self, limit):
        self.dictionary = Dictionary()
        words = []
        paragraphs = [p for name in sorted(topics) for p in topics[name].lower().split("\n\n")]
        paragraphs = list(dict.fromkeys(p for p in paragraphs if len(p) < 1000))
        np.random.RandomState(1).shuffle(paragraphs)
        for paragraph in paragraphs:
            words += [*re.findall(r"\w+|[^\w\s]", paragraph), "<eos>"]
        words = words[:limit]
        common = {w for w, n in Counter(words).items() if n >= 5}
        ids = torch.tensor([self.dictionary.add_word(w if w in common else "<unk>") for w in words])
        self.train = ids[: int(0.85 * len(ids))]
        self.valid = ids[int(0.85 * len(ids)) : int(0.92 * len(ids))]
        self.test = ids[int(0.92 * len(ids)) :]


def batchify(data, bsz):
    # Work out how cleanly we can divide the dataset into bsz parts.
    nbatch = data.size(0) // bsz
    # Trim off any extra elements that wouldn't cleanly fit (remainders).
    data = data.narrow(0, 0, nbatch * bsz)
    # Evenly divide the data across the bsz batches.
    data = data.view(bsz, -1).t().contiguous()
    return data


def get_batch(source, i, bptt):
    seq_len = min(bptt, len(source) - 1 - i)
    data = source[i : i + seq_len]
    target = source[i + 1 : i + 1 + seq_len].view(-1)
    return data, target


def repackage_hidden(h):
    """Wraps hidden states in new Tensors, to detach them from their history."""
    if isinstance(h, torch.Tensor):
        return h.detach()
    return tuple(repackage_hidden(v) for v in h)


class LockedDropout(nn.Module):
    def forward(self, x, dropout=0.5):
        if not self.training or not dropout:
            return x
        mask = x.new_empty(1, x.size(1), x.size(2)).bernoulli_(1 - dropout) / (1 - dropout)
        return x * mask


class WeightDropLSTM(nn.Module):
    """One layer whose hidden to hidden matrix loses some of its weights at each call."""

    def __init__(self, ninp, nhid, wdrop):
        super().__init__()
        self.lstm, self.wdrop = nn.LSTM(ninp, nhid), wdrop

    def forward(self, x, hidden):
        weights = dict(self.lstm.named_parameters())
        dropped = F.dropout(weights["weight_hh_l0"], p=self.wdrop, training=self.training)
        return torch.func.functional_call(self.lstm, {**weights, "weight_hh_l0": dropped}, (x, hidden))


class RNNModel(nn.Module):
    def __init__(self, ntoken, ninp, nhid, nlayers, dropout, wdrop, tie_weights=True):
        super().__init__()
        self.lockdrop = LockedDropout()
        self.encoder = nn.Embedding(ntoken, ninp)
        sizes = [ninp] + [nhid] * (nlayers - 1) + [ninp]
        self.rnns = nn.ModuleList([WeightDropLSTM(sizes[k], sizes[k + 1], wdrop) for k in range(nlayers)])
        self.decoder = nn.Linear(ninp, ntoken)
        self.encoder.weight.data.uniform_(-0.1, 0.1)
        self.decoder.bias.data.fill_(0)
        if tie_weights:
            self.decoder.weight = self.encoder.weight
        self.sizes, self.dropout = sizes, dropout

    def forward(self, input, hidden):
        output = self.lockdrop(self.encoder(input), self.dropout)
        new_hidden = []
        for rnn, h in zip(self.rnns, hidden):
            raw_output, new_h = rnn(output, h)
            new_hidden.append(new_h)
            output = self.lockdrop(raw_output, self.dropout)
        decoded = self.decoder(output.reshape(-1, output.size(2)))
        return decoded, new_hidden, raw_output, output

    def init_hidden(self, bsz):
        weight = self.encoder.weight
        return [(weight.new_zeros(1, bsz, n), weight.new_zeros(1, bsz, n)) for n in self.sizes[1:]]


corpus = Corpus(args.words)
eval_batch_size, test_batch_size = 10, 1
train_data = batchify(corpus.train, args.batch_size)
val_data = batchify(corpus.valid, eval_batch_size)
test_data = batchify(corpus.test, eval_batch_size)

ntokens = len(corpus.dictionary.idx2word)
model = RNNModel(ntokens, args.emsize, args.nhid, args.nlayers, args.dropout, args.wdrop)
criterion = nn.CrossEntropyLoss()


def evaluate(data_source, batch_size):
    model.eval()
    total_loss = 0.0
    hidden = model.init_hidden(batch_size)
    with torch.no_grad():
        for i in range(0, data_source.size(0) - 1, args.bptt):
            data, targets = get_batch(data_source, i, args.bptt)
            output, hidden, _, _ = model(data, hidden)
            total_loss += len(data) * criterion(output, targets).item()
            hidden = repackage_hidden(hidden)
    return total_loss / (len(data_source) - 1)


def train():
    total_loss = 0.0
    hidden = model.init_hidden(args.batch_size)
    batch, i = 0, 0
    while i < train_data.size(0) - 1 - 1:
        bptt = args.bptt if np.random.random() < 0.95 else args.bptt / 2.0
        # Prevent excessively small or negative sequence lengths
        seq_len = max(5, int(np.random.normal(bptt, 5)))
        lr2 = optimizer.param_groups[0]["lr"]
        optimizer.param_groups[0]["lr"] = lr2 * seq_len / args.bptt
        model.train()
        data, targets = get_batch(train_data, i, seq_len)
        hidden = repackage_hidden(hidden)
        optimizer.zero_grad()
        output, hidden, raw_output, dropped = model(data, hidden)
        raw_loss = criterion(output, targets)
        loss = raw_loss
        # Activation regularization, and temporal activation regularization (slowness)
        if args.alpha:
            loss = loss + args.alpha * dropped.pow(2).mean()
        if args.beta:
            loss = loss + args.beta * (raw_output[1:] - raw_output[:-1]).pow(2).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        total_loss += raw_loss.item()
        optimizer.param_groups[0]["lr"] = lr2
        batch += 1
        i += seq_len
    return total_loss / batch


lr = args.lr
best_val_loss, best_state = None, None
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, weight_decay=args.wdecay)
for epoch in range(1, args.epochs + 1):
    train_loss = train()
    val_loss = evaluate(val_data, eval_batch_size)
    print(
        f"| end of epoch {epoch:3d} | lr {optimizer.param_groups[0]['lr']:.2f} | train loss {train_loss:5.2f} "
        f"| valid loss {val_loss:5.2f} | valid ppl {math.exp(val_loss):8.2f}"
    )
    if best_val_loss is None or val_loss < best_val_loss:
        best_state, best_val_loss = copy.deepcopy(model.state_dict()), val_loss
    else:
        # Anneal the learning rate if no improvement has been seen in the validation dataset.
        optimizer.param_groups[0]["lr"] /= 4.0

model.load_state_dict(best_state)
test_loss = evaluate(test_data, eval_batch_size)
print(f"| End of training | test loss {test_loss:5.2f} | test ppl {math.exp(test_loss):8.2f}")
print(f"FINAL test_ppl={math.exp(test_loss):.2f}")
