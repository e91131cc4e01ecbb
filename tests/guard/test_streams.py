"""Batches from a script's own generators, models that mix samples whatever their loss, and labels of a generator's critic."""

import re

import pytest

from tests.conftest import patched
from tests.guard import common_scripts
from tests.guard.guarding import SCRIPTS, guard
from tests.helpers import patches

GENERATOR = """
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(1)
rng = np.random.default_rng(1)
x = rng.normal(size=(1024, 8)).astype(np.float32)
y = (x[:, 0] > 0).astype(np.int64) + 2 * (x[:, 1] * x[:, 2] > 0)


def data_iter(features, labels, size):
    order = rng.permutation(len(features))
    for i in range(0, len(order), size):
        yield features[order[i : i + size]], labels[order[i : i + size]]


model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
for epoch in range(12):
    model.train()
    for a, b in data_iter(x[:768], y[:768], 32):
        loss = F.cross_entropy(model(torch.from_numpy(a)), torch.from_numpy(b))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        right = sum((model(torch.tensor(a)).argmax(1) == torch.tensor(b)).sum().item() for a, b in data_iter(x[768:], y[768:], 64))
    print(f"epoch {epoch} accuracy {right / 256:.3f}")
"""
AROUND = patched(
    GENERATOR,
    (
        "\n\nmodel =",
        """
class Pictures(torch.utils.data.IterableDataset):
    def samples(self):
        for i in rng.permutation(768):
            yield x[i].reshape(2, 4), y[i]

    def __iter__(self):
        for picture, label in self.samples():
            yield picture.reshape(8), label


loader = torch.utils.data.DataLoader(Pictures(), 32)


def batches(source):
    for a, b in source:
        yield a.numpy(), b.numpy()


first = data_iter(x, y, 512)
print(next(first)[0].mean(), next(first)[0].mean())

model =""",
    ),
    ("in data_iter(x[:768], y[:768], 32)", "in batches(loader)"),
)
SERIES = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
x = torch.randn(512, 12, 3).cumsum(1)
loader = DataLoader(TensorDataset(x[:, :, :2], x[:, -1, :1] - x[:, -2, 1:2]), 32, shuffle=True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(2, 16, batch_first=True), nn.Linear(16, 1)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])


model = Net()
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
for epoch in range(4):
    for a, b in loader:
        loss = (model(a) - b).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
EMBED = patched(
    SERIES,
    ("x[:, -1, :1] - x[:, -2, 1:2]", "x[:, 1:, :2] + 0.1 * torch.randn(512, 11, 2)"),
    ("loss = (model(a) - b).square().mean()", "v = torch.cat([a[:, :-1], b], 2).flatten(1)[:, :24].reshape(len(a), 12, 2)\n"
     "        loss = nn.functional.cross_entropy(nn.functional.normalize(model(a)) @ nn.functional.normalize(model(v)).T / 0.2,"
     " torch.arange(len(a)))"),
    ("nn.Linear(16, 1)", "nn.Linear(16, 8)"),
)  # fmt: skip


def failed(verdicts):
    return [v.id for v in verdicts.values() if v.blocks]


def test_guard_rehearses_batches_of_a_generator(launch, tmp_path):
    """Through the command: arrays that a generator yields are exchanged like a loader's batches; labels that were shuffled alone
    are found."""
    (tmp_path / "train.py").write_text(GENERATOR)
    done = launch("guard", "--seconds", "0.5", "--steps", "80", "train.py")
    assert done.returncode == 0, done.shown
    for check in ("overfit", "signal", "metric", "learning", "evaluated"):
        assert re.search(f"pass +{check}", done.stdout), done.shown


def test_guard_stops_labels_that_a_generator_gets_shuffled(tmp_path):
    source = patched(GENERATOR, ("\n\n\ndef data_iter", "\nrng.shuffle(y)\n\n\ndef data_iter"))
    verdicts, output, _ = guard(source, tmp_path, **{"--seconds": "1", "--steps": "80"})
    assert failed(verdicts) == ["signal"], output


def test_generators_around_a_loader_or_behind_it_are_left_alone(tmp_path):
    """What a generator makes of a loader's batches, or of samples for a loader, is no second source; next() never ends early."""
    verdicts, output, _ = guard(
        AROUND, tmp_path, interventions=False, **{"--seconds": "10"}
    )  # longer than the script takes
    assert not failed(verdicts), output
    assert re.search(r"pass +samples +a stream", output), output
    # 12 epochs of one pass for training and one for the evaluation, and the generator that next() was called on
    assert "stopped: the script ended" in output
    assert "25 passes over loaders" in output, output


@pytest.mark.parametrize("source", [SERIES, EMBED], ids=["regression", "contrastive"])
def test_guard_stops_a_model_that_mixes_samples(source, launch, tmp_path):
    """Through the command: no evaluation and no classes are needed."""
    words = ("guard", "--no-interventions", "--seconds", "0.3", "--only", "dependency", "train.py")
    (tmp_path / "train.py").write_text(source)
    done = launch(*words)
    assert done.returncode == 0, done.shown
    assert "outputs of Net change by 0 of" in done.stdout, done.shown
    (tmp_path / "train.py").write_text(patched(source, (", batch_first=True", "")))
    done = launch(*words)
    assert done.returncode == 3, done.shown
    assert "batch_first=True is missing" in done.stdout, done.shown


PACKED = """
import random
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader

random.seed(1), torch.manual_seed(1)
texts = [torch.randint(1, 30, (random.randint(3, 12),)) for _ in range(400)]
rows = [(t, float((t > 15).float().mean() > 0.5)) for t in texts]


def collate(batch):
    batch = sorted(batch, key=lambda row: -len(row[0]))
    texts, labels = [t for t, _ in batch], torch.tensor([y for _, y in batch])
    return pad_sequence(texts, batch_first=True), torch.tensor([len(t) for t in texts]), labels


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.rnn, self.head = nn.Embedding(30, 16), nn.GRU(16, 16, batch_first=True), nn.Linear(16, 1)

    def forward(self, x, lengths):
        return self.head(self.rnn(pack_padded_sequence(self.embedding(x), lengths, batch_first=True))[1][0])[:, 0]


model = Net()
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
for epoch in range(4):
    for x, lengths, y in DataLoader(rows, 16, shuffle=True, collate_fn=collate):
        loss = nn.functional.binary_cross_entropy_with_logits(model(x, lengths), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
UNSORTED = (("texts, labels = [t for t, _ in batch], torch.tensor([y for _, y in batch])",
             "labels = torch.tensor([y for _, y in batch])\n"
             "    texts = sorted([t for t, _ in batch], key=len, reverse=True)"),
            ("    batch = sorted(batch, key=lambda row: -len(row[0]))\n", ""))  # fmt: skip
NEGATIVES = """
import torch
from torch import nn
from torch.nn.functional import logsigmoid
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
users = torch.randint(60, (2000,))
loader = DataLoader(TensorDataset(users, (users // 20) * 20 + torch.randint(20, (2000,))), 64, shuffle=True)


class Factors(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.item = nn.Embedding(60, 16), nn.Embedding(60, 16)

    def forward(self, user, item, other):
        u = self.user(user)
        return -(logsigmoid((u * self.item(item)).sum(1)) + logsigmoid(-(u * self.item(other)).sum(1))).mean()


model = Factors()
optimizer = torch.optim.Adam(model.parameters(), 0.1)
for epoch in range(8):
    for user, item in loader:
        loss = model(user, item, torch.randint(60, (len(user),)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("source", "hunks", "check", "words"),
    [
        (PACKED, UNSORTED, "samples", "apply the same order"),
        (
            NEGATIVES,
            (("logsigmoid(-(u", "logsigmoid((u"),),
            "direction",
            "the minus of the negative samples is missing",
        ),
    ],
    ids=["collate", "negatives"],
)
def test_guard_stops_rows_sorted_apart_and_a_loss_without_negatives(source, hunks, check, words, launch, tmp_path):
    """Through the command, each beside its healthy script."""
    argv = ("guard", "--no-interventions", "--seconds", "0.5", "--steps", "200", "train.py")
    (tmp_path / "train.py").write_text(source)
    done = launch(*argv)
    assert done.returncode == 0, done.shown
    (tmp_path / "train.py").write_text(patched(source, *hunks))
    done = launch(*argv)
    assert done.returncode == 3, done.shown
    assert re.findall(r"FAIL +(\S+)", done.stdout) == [check], done.shown
    assert words in done.stdout, done.shown


COMMON = {
    "skipgram--neg_sign": ("direction", "the minus of the negative samples"),
    "sentiment--sorted_lengths": ("samples", "apply the same order"),
    "skipgram--pairs_reshaped": ("dependency", "its 1024 rows are those of 512 of 1024 samples"),
    "cgan--other_labels": ("direction", "other labels than the generator"),
    "keras_trainer--shuffled_apart": ("signal", "shuffled or filtered alone"),
}


@pytest.mark.verify
@pytest.mark.parametrize("name", COMMON)
def test_guard_stops_common(name, tmp_path):
    """Bugs of the fourth set that were missed at first."""
    one = next(p for p in common_scripts.BUGS if p.id == name)
    verdicts, output, _ = guard(patches.patched(one), tmp_path)
    assert failed(verdicts) == [COMMON[name][0]], output
    assert COMMON[name][1] in output


@pytest.mark.verify
@pytest.mark.parametrize("name", ["cgan", "skipgram", "keras_trainer", "sentiment"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_guard_is_quiet_beside_these(name, seed, tmp_path):
    verdicts, output, _ = guard((SCRIPTS / f"{name}.py").read_text(), tmp_path, seed=seed)
    assert not failed(verdicts), output
