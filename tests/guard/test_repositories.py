"""Shapes of popular public repositories that guard could not rehearse or observe: sparse matrices, traced models, evaluations without
no_grad(), iterators of their own, batches that are objects, terminals."""

import os

from trainworthy.guard.hooks import shield
from trainworthy.guard.measures.scores.printed_scores import series

from tests.conftest import patched
from tests.guard.guarding import STEPS, guard

GRAPH = """
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
n = 200
x = torch.randn(n, 8)
y = (x[:, 0] > 0).long()
edges = torch.cat([torch.arange(n).repeat(2, 1), torch.randint(n, (2, 40))], 1)
adj = torch.sparse_coo_tensor(edges, torch.ones(edges.shape[1]), (n, n)).coalesce()


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 2)

    def forward(self, x, adj):
        x = F.dropout(F.relu(torch.spmm(adj, self.first(x))), 0.2, training=self.training)
        return F.log_softmax(torch.spmm(adj, self.second(x)), dim=1)


model = GCN()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(60):
    model.train()
    optimizer.zero_grad()
    loss = F.nll_loss(model(x, adj)[:100], y[:100])
    loss.backward()
    optimizer.step()
    model.eval()
    out = model(x, adj)  # without no_grad()
    print(f"acc_val: {(out[100:].argmax(1) == y[100:]).float().mean():.3f}")
"""


def test_a_sparse_matrix_is_a_model_input_like_any_other(tmp_path):
    verdicts, printed, _ = guard(GRAPH, tmp_path, interventions=False)
    assert verdicts["finite"].verdict == verdicts["dependency"].verdict == verdicts["modes"].verdict == "pass", printed
    assert not [v for v in verdicts.values() if v.blocks], printed
    assert "the observer failed" not in printed


def test_an_evaluation_with_gradients_after_which_train_is_missing(tmp_path):
    broken = patched(GRAPH, ("for epoch in range(60):\n    model.train()", "model.train()\nfor epoch in range(60):"))
    verdicts, printed, _ = guard(broken, tmp_path, interventions=False)
    assert "trains in eval mode" in verdicts["modes"].measured, printed


TRACED = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 4, 3), nn.Linear(4 * 36, 4)

    def forward(self, x):
        return self.head(torch.dropout(torch.relu(self.conv(x)), 0.1, self.training).view(x.size(0), -1))

torch.manual_seed(0)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
graph = torch.jit.trace(net, torch.zeros(1, 1, 8, 8), check_trace=False)  # as SummaryWriter.add_graph does
loader = torch.utils.data.DataLoader([(torch.randn(1, 8, 8), i % 4) for i in range(64)], 8, shuffle=True)
for epoch in range(4):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
"""


def test_a_model_may_be_traced_before_it_trains(tmp_path):
    verdicts, printed, _ = guard(TRACED, tmp_path, interventions=False)
    assert verdicts["wiring"].verdict == "pass", printed
    assert not [v for v in verdicts.values() if v.blocks], printed


def test_an_error_of_the_observer_does_not_reach_the_script():
    class Fragile:
        busy, notes = False, []

        def root(self, *args):
            raise NotImplementedError("no storage")

        def batch(self, one, batch):
            raise RuntimeError

    seen = Fragile()
    covered = shield.Shield(seen)
    assert covered.root(1) is None
    assert covered.batch("pass", "rows") == "rows"
    covered.busy = True
    assert seen.busy
    assert "root: NotImplementedError: no storage" in seen.notes[0]


ITERATOR = """
import random
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(1)
words = torch.randint(2, 200, (800, 12))
kinds = (words % 4 == 0).sum(1).clamp(1, 4) - 1
rows = [(w.tolist(), int(k)) for w, k in zip(words, kinds)]


class DatasetIterator:
    def __init__(self, rows, size):
        self.rows, self.size, self.at = rows, size, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.at >= len(self.rows):
            self.at = 0
            raise StopIteration
        part = self.rows[self.at : self.at + self.size]
        self.at += self.size
        return torch.tensor([w for w, _ in part]), torch.tensor([k for _, k in part])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.dropout, self.head = nn.Embedding(200, 32), nn.Dropout(0.2), nn.Linear(32, 4)

    def forward(self, x):
        return self.head(self.dropout(self.embed(x).sum(1)))


train, test = DatasetIterator(rows[:640], 32), DatasetIterator(rows[640:], 32)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(8):
    model.train()
    for i, (x, y) in enumerate(train):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        right = sum(int((model(x).argmax(1) == y).sum()) for x, y in test)
    print(f"epoch {epoch} val acc {right / 160:.3f}")
"""


def test_a_class_that_iterates_over_batches_is_a_loader(tmp_path):
    verdicts, printed, _ = guard(ITERATOR, tmp_path)
    assert not [v for v in verdicts.values() if v.blocks], printed
    assert verdicts["overfit"].verdict == verdicts["passes"].verdict == "pass", printed
    broken = patched(ITERATOR, ("return torch.tensor([w for w, _ in part]), torch.tensor([k for _, k in part])",
                                "return torch.tensor([w for w, _ in part]), torch.tensor([3 for _ in part])"))  # fmt: skip
    verdicts, printed, _ = guard(broken, tmp_path, interventions=False)
    assert verdicts["targets"].blocks, printed


OBJECTS = """
import torch
from torch import nn

torch.manual_seed(0)
words = torch.randint(1, 40, (512, 8))
rows = list(zip(words, (words % 2).sum(1)))


class Batch:
    def __init__(self, rows):
        self.text = torch.stack([x for x, _ in rows])
        self.mask = self.text != 0
        self.label = torch.stack([y for _, y in rows])
        self.source = "rows"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(40, 32), nn.Linear(32, 9)

    def forward(self, text, mask):
        return self.head((self.embed(text) * mask[..., None]).sum(1))


model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(6):
    for batch in torch.utils.data.DataLoader(rows, 32, shuffle=True, collate_fn=Batch):
        loss = nn.functional.cross_entropy(model(batch.text, batch.mask), batch.label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


def test_a_batch_may_be_an_object_with_attributes(tmp_path):
    verdicts, printed, _ = guard(OBJECTS, tmp_path)
    assert not [v for v in verdicts.values() if v.blocks], printed
    assert verdicts["overfit"].verdict == "pass", printed
    broken = patched(OBJECTS, ("batch.mask), batch.label)", "batch.mask), batch.label.roll(1))"))
    verdicts, printed, _ = guard(broken, tmp_path)
    assert verdicts["targets"].blocks or verdicts["overfit"].blocks, printed


TERMINAL = (
    """
import os
import torch

_, width = os.popen("stty size", "r").read().split()  # the progress bar of many scripts for CIFAR
try:
    input("continue?")
except EOFError:
    print("no answer, width", int(width))
"""
    + STEPS
)


def test_a_script_may_ask_for_the_size_of_its_terminal(tmp_path):
    before, (_, screen) = os.dup(0), os.openpty()
    try:
        os.dup2(screen, 0)
        verdicts, printed, _ = guard(TERMINAL, tmp_path, interventions=False)
    finally:
        os.dup2(before, 0)
    assert verdicts["finite"].verdict == "pass", printed


FOLDERS = (
    """
import os
import tempfile
import torch

with tempfile.TemporaryDirectory() as folder:
    os.mkdir(os.path.join(folder, "part"))
os.makedirs("logs/old")
open("logs/old/a", "w").close()
os.remove("logs/old/a")
os.rmdir("logs/old")
assert not os.path.exists("logs/old")
assert not os.path.exists(folder)
print("mean squared error: [Errno 21]")
"""
    + STEPS
)


def test_a_script_may_remove_its_folders(tmp_path):
    verdicts, printed, _ = guard(FOLDERS, tmp_path, interventions=False)
    assert verdicts["finite"].verdict == "pass", printed


def test_the_number_of_a_system_error_is_no_score():
    found = series("IsADirectoryError: [Errno 21] Is a directory\nTest Loss: 0.5")
    assert [s.values for s in found.values()] == [[0.5]]
