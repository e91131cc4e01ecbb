"""Matrix factorisation with biases: how often a word occurs in a module of Python's standard library (log of the count), from pairs."""

import inspect
import re
from collections import Counter
from importlib import import_module

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainworthy

SEED = 0
MODULES = (
    "argparse ast asyncio.base_events asyncio.tasks bdb calendar codecs collections concurrent.futures.process "
    "configparser contextlib copy csv dataclasses datetime decimal difflib dis doctest email.message enum "
    "fractions ftplib functools gettext glob gzip heapq html.parser http.client http.cookiejar http.server imaplib "
    "inspect ipaddress json.decoder json.encoder logging logging.handlers mailbox mimetypes multiprocessing.pool "
    "numbers optparse os pathlib pdb pickle pickletools platform plistlib poplib pprint pstats pydoc queue random "
    "sched selectors shelve shlex shutil smtplib socket socketserver ssl statistics string subprocess tarfile "
    "tempfile textwrap threading timeit tokenize trace traceback types typing unittest.case unittest.loader "
    "unittest.mock urllib.parse urllib.request uuid warnings wave weakref xml.dom.minidom xml.sax.handler "
    "xmlrpc.client zipfile"
).split()


def count_words():
    counters = []
    for name in MODULES:
        counters.append(Counter(re.findall(r"[a-z]{3,}", inspect.getsource(import_module(name)).lower())))
    spread = Counter(w for c in counters for w in c)
    words = sorted(w for w, n in spread.items() if n >= 25)
    rows = [(m, w, np.log1p(c[word])) for m, c in enumerate(counters) for w, word in enumerate(words)]
    return np.array(rows), len(words)


table, n_words = count_words()
table = table[np.random.default_rng(0).permutation(len(table))]
cut = int(0.8 * len(table))


def as_dataset(rows):
    return TensorDataset(
        torch.tensor(rows[:, 0]).long(), torch.tensor(rows[:, 1]).long(), torch.tensor(rows[:, 2]).float()
    )


train_set, val_set = as_dataset(table[:cut]), as_dataset(table[cut:])
MEAN = float(table[:cut, 2].mean())


class Factors(nn.Module):
    def __init__(self, rank=8):
        super().__init__()
        self.module, self.word = nn.Embedding(len(MODULES), rank), nn.Embedding(n_words, rank)
        self.module_bias, self.word_bias = nn.Embedding(len(MODULES), 1), nn.Embedding(n_words, 1)
        for table in (self.module, self.word):
            nn.init.normal_(table.weight, std=0.1)
        for table in (self.module_bias, self.word_bias):
            nn.init.zeros_(table.weight)

    def forward(self, m, w):
        bias = self.module_bias(m).squeeze(-1) + self.word_bias(w).squeeze(-1)
        return MEAN + bias + (self.module(m) * self.word(w)).sum(-1)


def loss_fn(model, batch):
    m, w, value = batch
    return nn.functional.mse_loss(model(m, w), value)


def train_epoch(model, optimizer, loader):
    model.train()
    for batch in loader:
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()


def rmse(model, loader):
    model.eval()
    total = 0.0
    with torch.no_grad():
        for m, w, value in loader:
            total += (model(m, w) - value).square().sum().item()
    return (total / len(loader.dataset)) ** 0.5


def make_optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=2e-5)


def make_script():
    model = Factors()
    return trainworthy.Script(
        model=model,
        optimizer=make_optimizer(model),
        train=train_set,
        val=val_set,
        batch_size=256,
        target="2",
        loss=loss_fn,
        metric=rmse,
        higher_is_better=False,
        floor=float(val_set.tensors[2].std()),
        train_loop=train_epoch,
    )


def main():
    torch.manual_seed(SEED)
    model = Factors()
    optimizer = make_optimizer(model)
    train_loader, val_loader = DataLoader(train_set, 256, shuffle=True), DataLoader(val_set, 1024)
    print(len(train_set), float(val_set.tensors[2].std()))
    for epoch in range(8):
        train_epoch(model, optimizer, train_loader)
        print(epoch + 1, rmse(model, val_loader))
    print(f"FINAL rmse={rmse(model, val_loader):.4f}")


if __name__ == "__main__":
    main()
