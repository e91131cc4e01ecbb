"""Shapes of popular public repositories: graphs with sparse matrices, traced models, codes that are returned with their samples,
iterators of their own."""

import os

from trainworthy.core.guard import shield
from trainworthy.core.guard.readings import series

from tests.conftest import patched
from tests.guard.guarding import guard

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
    assert "trains on in eval mode" in verdicts["modes"].measured, printed


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


CODE = """
import torch
from torch import nn

torch.manual_seed(0)

class Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.mean, self.spread, self.back = nn.Linear(20, 32), nn.Linear(32, 6), nn.Linear(32, 6), nn.Linear(6, 20)

    def forward(self, x):
        h = torch.tanh(self.body(x))
        mean, spread = self.mean(h), self.spread(h)
        z = mean + torch.exp(0.5 * spread) * torch.randn_like(mean)
        return self.back(z), mean, spread, z

model = Vae()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
data = torch.utils.data.TensorDataset(torch.randn(400, 20))
for epoch in range(3):
    for (x,) in torch.utils.data.DataLoader(data, 20, shuffle=True):
        made, mean, spread, z = model(x)
        divergence = -0.5 * torch.sum(1 + spread - mean.pow(2) - spread.exp())
        loss = (((made - x) ** 2).sum() + 0.002 * divergence) / len(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


def test_a_sample_of_the_code_that_a_model_returns_is_no_variance(tmp_path):
    verdicts, printed, _ = guard(CODE, tmp_path, interventions=False)
    assert verdicts["direction"].verdict == "pass", printed
    broken = patched(CODE, ("spread.exp())", "spread)"))
    verdicts, printed, _ = guard(broken, tmp_path, interventions=False)
    assert "no gradient for the variance" in verdicts["direction"].measured, printed


PACE = """
import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(160, 4)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long()), 8, shuffle=True)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)
for epoch in range(0, 0 + 200):
    for a, b in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(a), b).backward()
        optimizer.step()
    scheduler.step()
"""


def test_a_number_of_epochs_may_be_a_multiple_of_the_length_of_an_epoch(tmp_path):
    verdicts, printed, _ = guard(PACE, tmp_path, interventions=False)
    assert not verdicts["schedule"].blocks, printed
    for length in ("10 * len(loader)", "len(loader)"):
        broken = patched(PACE, ("T_max=200", f"T_max={length}"))
        verdicts, printed, _ = guard(broken, tmp_path, interventions=False)
        assert verdicts["schedule"].blocks, printed


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


TWO_HEADS = """
import torch
from torch import nn

torch.manual_seed(0)


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, i):
        words = torch.randint(4, 60, (10,))
        hidden = torch.rand(10) < 0.3
        return words.masked_fill(hidden, 3), words.masked_fill(~hidden, 0), torch.randint(2, ())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.word, self.pair = nn.Embedding(60, 16), nn.Linear(16, 60), nn.Linear(16, 2)

    def forward(self, x):
        h = self.embed(x)
        return self.pair(h.mean(1)).log_softmax(-1), self.word(h).log_softmax(-1)


model, criterion = Net(), nn.NLLLoss(ignore_index=0)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for x, hidden, follows in torch.utils.data.DataLoader(Rows(), 16, shuffle=True):
    pair, word = model(x)
    loss = nn.functional.nll_loss(pair, follows) + criterion(word.transpose(1, 2), hidden)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_loss_of_two_classes_that_ignores_one(tmp_path):
    verdicts, printed, _ = guard(TWO_HEADS, tmp_path, interventions=False)
    assert verdicts["targets"].verdict == "pass", printed
    broken = patched(TWO_HEADS, ("nn.functional.nll_loss(pair, follows)", "criterion(pair, follows)"))
    verdicts, printed, _ = guard(broken, tmp_path, interventions=False)
    assert "ignores class 0" in verdicts["targets"].measured, printed


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


TERMINAL = """
import os
import torch

_, width = os.popen("stty size", "r").read().split()  # the progress bar of many scripts for CIFAR
try:
    input("continue?")
except EOFError:
    print("no answer, width", int(width))
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x, y in torch.utils.data.DataLoader([(torch.randn(4), i % 2) for i in range(64)], 8, shuffle=True):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
"""


def test_a_script_may_ask_for_the_size_of_its_terminal(tmp_path):
    before, (_, screen) = os.dup(0), os.openpty()
    try:
        os.dup2(screen, 0)
        verdicts, printed, _ = guard(TERMINAL, tmp_path, interventions=False)
    finally:
        os.dup2(before, 0)
    assert verdicts["finite"].verdict == "pass", printed


VIEWS = """
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
rows = torch.randn(256, 12)


def scores(z):
    z = F.normalize(z, dim=1)
    all_pairs, n = z @ z.t(), len(z)
    same = torch.arange(n // 2).repeat(2)
    same, alone = same[None] == same[:, None], torch.eye(n, dtype=torch.bool)
    positive = all_pairs[same & ~alone].view(n, 1)
    return torch.cat([positive, all_pairs[~same].view(n, -1)], 1) / 0.1, torch.zeros(n, dtype=torch.long)


model = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 16))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
data = torch.utils.data.TensorDataset(rows, torch.zeros(256, dtype=torch.long))
for epoch in range(20):
    for x, _ in torch.utils.data.DataLoader(data, 32, shuffle=True):
        views = torch.cat([x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)])
        loss = F.cross_entropy(*scores(model(views)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


def test_views_of_eight_repeated_samples_cannot_be_told_apart(tmp_path):
    verdicts, printed, _ = guard(VIEWS, tmp_path)
    assert not [v for v in verdicts.values() if v.blocks], printed
    assert "repeated" in verdicts["overfit"].reason, printed


DECODER = """
import torch
from torch import nn

torch.manual_seed(0)
source = torch.randint(3, 40, (400, 8))
target = torch.cat([torch.full((400, 1), 1), source.flip(1), torch.full((400, 1), 2)], 1)


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(40, 32), nn.Embedding(16, 32)
        self.body = nn.Transformer(32, 2, 1, 1, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, 40)

    def read(self, x):
        return self.embed(x) + self.place(torch.arange(x.shape[1]))

    def forward(self, src_seq, trg_seq):
        mask = nn.Transformer.generate_square_subsequent_mask(trg_seq.shape[1])
        return self.head(self.body(self.read(src_seq), self.read(trg_seq), tgt_mask=mask))


model = Translator()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
data = torch.utils.data.TensorDataset(source, target)
for epoch in range(4):
    for src, trg in torch.utils.data.DataLoader(data, 25, shuffle=True):
        out = model(src, trg[:, :-1])
        loss = nn.functional.cross_entropy(out.reshape(-1, 40), trg[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


def test_a_decoder_must_not_see_the_tokens_that_follow(tmp_path):
    verdicts, printed, _ = guard(DECODER, tmp_path, interventions=False)
    assert not [v for v in verdicts.values() if v.blocks], printed
    assert "only later tokens" in verdicts["dependency"].measured, printed
    broken = patched(DECODER, ("tgt_mask=mask", "tgt_mask=None"))
    verdicts, printed, _ = guard(broken, tmp_path, interventions=False)
    assert verdicts["dependency"].blocks, printed
    smoothed = (
        "loss = nn.functional.cross_entropy(out.reshape(-1, 40), trg[:, 1:].reshape(-1))",
        "gold, logs = trg[:, 1:].reshape(-1), out.reshape(-1, 40).log_softmax(1)\n"
        "        smooth = torch.full_like(logs, 0.1 / 39).scatter(1, gold[:, None], 0.9)\n"
        "        loss = -(smooth * logs).sum(1).mean()",
    )
    for source, wrong in ((DECODER, False), (broken, True)):
        verdicts, printed, _ = guard(patched(source, smoothed), tmp_path, interventions=False)
        assert verdicts["dependency"].blocks == wrong, printed


FOLDERS = """
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
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x, y in torch.utils.data.DataLoader([(torch.randn(4), i % 2) for i in range(64)], 8, shuffle=True):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
"""


def test_a_script_may_remove_its_folders(tmp_path):
    verdicts, printed, _ = guard(FOLDERS, tmp_path, interventions=False)
    assert verdicts["finite"].verdict == "pass", printed


def test_the_number_of_a_system_error_is_no_score():
    found = series("IsADirectoryError: [Errno 21] Is a directory\nTest Loss: 0.5")
    assert [s.values for s in found.values()] == [[0.5]]


def test_a_scheduler_may_be_stepped_in_another_module(tmp_path):
    (tmp_path / "loop.py").write_text(
        "def after(epoch, scheduler):\n    if epoch >= 100:  # constant before\n        scheduler.step()\n"
    )
    later = patched(PACE, ("import torch\nfrom torch", "import torch\nfrom loop import after\nfrom torch"),
                    ("    scheduler.step()", "    after(epoch, scheduler)"))  # fmt: skip
    verdicts, printed, _ = guard(later, tmp_path, interventions=False)
    assert not verdicts["schedule"].blocks, printed
    never = patched(later, ("    after(epoch, scheduler)", "    after(epoch, loader)"))
    (tmp_path / "loop.py").write_text("def after(epoch, rate):\n    pass\n")
    verdicts, printed, _ = guard(never, tmp_path, interventions=False)
    assert "never stepped" in verdicts["schedule"].measured, printed
