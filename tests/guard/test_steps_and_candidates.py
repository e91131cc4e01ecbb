"""What ten further public scripts and two bugs in each showed: recommenders that see the candidate, fields without offsets, a state that is
dropped, an argsort that is no rank, windows that hold their target, classes in order."""

from types import SimpleNamespace as Namespace

import pytest
import torch
from torch.nn import functional as F
from trainworthy.core.base.names import more_is_better
from trainworthy.guard.checks.forced import at_its_place
from trainworthy.guard.checks.names import check
from trainworthy.guard.measures.data.fields import Fields
from trainworthy.guard.measures.data.views import Views
from trainworthy.guard.measures.losses import margins
from trainworthy.guard.measures.losses.regression import among_steps, ends_with
from trainworthy.guard.measures.losses.targets import shifts
from trainworthy.guard.measures.models.pulled import Pulled, probe
from trainworthy.guard.measures.rates import restarted

from tests.guard.guarding import guard

DRAW = torch.Generator().manual_seed(0)

RECOMMENDER = """
import numpy as np
import torch
from torch import nn

torch.manual_seed(0)
rng = np.random.default_rng(0)
ITEMS, LENGTH = 60, 12


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.items, self.places = nn.Embedding(ITEMS + 1, 16, padding_idx=0), nn.Embedding(LENGTH, 16)
        self.attention, self.norm = nn.MultiheadAttention(16, 1, batch_first=True), nn.LayerNorm(16)

    def forward(self, seen, right, wrong):
        x = self.items(torch.as_tensor(seen))
        x *= 4.0
        x += self.places.weight
        later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        x = self.norm(x + self.attention(x, x, x, attn_mask=MASK)[0])
        return [(x * self.items(torch.as_tensor(y))).sum(-1) for y in (right, wrong)]


model = Model()
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
for step in range(60):
    first = rng.integers(1, ITEMS + 1, (32, 1))
    row = (first + np.arange(LENGTH + 1) * rng.integers(1, 4, (32, 1)) - 1) % ITEMS + 1
    right, wrong = model(row[:, :-1], row[:, 1:], rng.integers(1, ITEMS + 1, (32, LENGTH)))
    optimizer.zero_grad()
    loss = nn.functional.binary_cross_entropy_with_logits(torch.cat([right, wrong]), torch.cat([torch.ones_like(right), torch.zeros_like(wrong)]))
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.4f}")
"""


@pytest.mark.parametrize("masked", [True, False])
def test_a_recommender_that_sees_the_next_item(tmp_path, masked):
    verdicts, printed, _ = guard(
        RECOMMENDER.replace("MASK", "later" if masked else "None"), tmp_path, **{"--only": "dependency"}
    )
    assert verdicts["dependency"].blocks != masked, printed
    assert ("the causal mask is missing" in printed) != masked


SPEECH = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
classes = torch.arange(5).repeat_interleave(64)
x = torch.randn(320, 12) + 2 * torch.eye(5, 12)[classes]
model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 5))
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
for epoch in range(6):
    for a, b in DataLoader(TensorDataset(x, classes), 20, shuffle=SHUFFLE):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(a), b).backward()
        optimizer.step()
"""


@pytest.mark.parametrize("shuffled", [True, False])
def test_classes_in_order_with_a_border_in_some_batches(tmp_path, shuffled):
    """Of 16 batches of 20 samples of 64 each, four hold two classes."""
    verdicts, printed, _ = guard(SPEECH.replace("SHUFFLE", str(shuffled)), tmp_path, **{"--only": "targets"})
    assert verdicts["targets"].blocks != shuffled, printed
    assert ("sorted by class and not shuffled" in printed) != shuffled


@pytest.mark.parametrize(
    ("offset", "rows", "stops"),
    [
        (0, 500, True),
        (300, 500, False),  # as it should be
        (0, 300, False),  # users and items of one table, on purpose (a graph's nodes)
        (0, 20_000, False),  # a vocabulary
    ],
)
def test_fields_that_share_rows(offset: int, rows: int, stops: bool):
    fields, table = Fields(), torch.zeros(rows, 4)
    for _ in range(40):
        users, items = torch.randint(300, (256,), generator=DRAW), torch.randint(200, (256,), generator=DRAW)
        fields.look(torch.stack([users, items + offset], 1), table)
    assert (fields.fault() is not None) == stops


@pytest.mark.parametrize(("shift", "found"), [(0, [0]), (1, None)])
def test_single_steps_whose_targets_are_their_own_tokens(shift: int, found: list | None):
    text = torch.randint(30, (64, 2), generator=DRAW)
    root = (torch.nn.Embedding(30, 4), (text[:, 0], torch.zeros(1, 64, 4)), {})
    assert shifts(text[:, shift], -100, root) == found


def test_a_window_that_ends_with_what_is_to_be_forecast():
    series = torch.rand(64, 24, 5, generator=DRAW)
    units = torch.tensor([1.0, 20.0, 3.0, 0.5, 7.0])
    assert ends_with(series, series[:, -1])
    assert ends_with(series, series[:, -1] * units)
    assert not ends_with(series, torch.rand(64, 5, generator=DRAW))
    assert not ends_with(series, series[:, -1] + 0.01 * units)
    line = torch.arange(64.0)[:, None, None] + torch.arange(24.0)[:, None] + torch.rand(5, generator=DRAW)
    assert not ends_with(line, line[:, -1] + 3)  # a trend follows itself, with another start


UNROLLED = """
def train(inp, target):
    hidden = decoder.init_hidden()
    loss = 0
    for c in range(LENGTH):
        output, STATE = decoder(inp[:, c], hidden)
        loss += criterion(output, target[:, c])
    loss.backward()
    optimizer.step()

def evaluate(model, rows, hidden):
    total = 0
    for c in range(len(rows)):
        output, _ = model(rows[c], hidden)
        total += criterion(output, rows[c])
    return total

train(x, y)
evaluate(decoder, x, None)
"""
RANKED = """
def evaluate(scores):
    rank = scores.argsort()RANK[0].item()
    order = scores.argsort()
    rank_of_first = order.argsort()[0]
    best = scores.argsort()[0]
    return rank < 10, rank_of_first, best

print(evaluate(-model(x)))
"""


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        (UNROLLED.replace("STATE", "_"), "the state is not carried from step to step"),
        (UNROLLED.replace("STATE", "hidden"), ""),
        (RANKED.replace("RANK", ""), "the rank of item 0 is meant"),
        (RANKED.replace("RANK", ".argsort()"), ""),
    ],
)
def test_names(tmp_path, source: str, cause: str):
    (tmp_path / "train.py").write_text(source)
    found = check(tmp_path / "train.py")
    assert found["ok"] != bool(cause), found
    assert cause in str(found)


def test_a_correlation_is_better_if_higher():
    assert more_is_better("val_corr") is True
    assert more_is_better("correct") is None
    assert more_is_better("correlation_loss") is False


class Policy(torch.nn.Module):
    """Reads (state, action, state, action, ...) from the left, as decision transformers do."""

    def __init__(self, late: bool):
        super().__init__()
        self.late, self.states, self.actions = late, torch.nn.Linear(3, 8), torch.nn.Linear(2, 8)
        self.body, self.head = torch.nn.GRU(8, 8, batch_first=True), torch.nn.Linear(8, 2)

    def forward(self, states, actions):
        both = torch.stack([self.states(states), self.actions(actions)], 2).flatten(1, 2)
        return self.head(self.body(both)[0][:, int(self.late) :: 2])


@pytest.mark.parametrize("late", [True, False])
def test_an_action_that_is_predicted_from_itself(late: bool):
    states, actions = torch.randn(8, 6, 3, generator=DRAW), torch.randn(8, 6, 2, generator=DRAW)
    counts = torch.ones(8, 6, dtype=torch.bool)
    counts[:4, :2] = False  # padded on the left
    held = among_steps([states, actions], actions[counts])
    assert held is actions
    assert among_steps([states, actions], actions[counts].flip(0)) is None
    assert (at_its_place(Policy(late), (states, actions), {}, actions) is not None) == late


class Head(torch.nn.Module):
    """Cosines with a margin, as CosFace has it."""

    def __init__(self, margin: float):
        super().__init__()
        self.margin, self.weight = margin, torch.nn.Parameter(torch.randn(12, 8, generator=DRAW))

    def forward(self, features, labels):
        cosine = F.linear(F.normalize(features), F.normalize(self.weight))
        return 16 * (cosine - self.margin * F.one_hot(labels, 12))


@pytest.mark.parametrize(("margin", "stops"), [(0.3, False), (0.0, False), (-0.3, True)])
def test_a_margin_makes_the_right_class_harder(margin: float, stops: bool):
    head = Head(margin)
    given = (torch.randn(32, 8, generator=DRAW), torch.randint(12, (32,), generator=DRAW))
    seen = Namespace(control=True, calls=[{"root": id(head)}], several={id(head): (head, given, {})})
    assert (margins.check(seen)[0] is not None) == stops
    assert bool(margins.check(seen)[1]) == bool(margin)


VERIFIED = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
y = torch.arange(320) % 6
x = torch.randn(320, 12) + 2 * torch.eye(6, 12)[y]
body, head = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 8)), nn.Linear(8, 6)
optimizer = torch.optim.Adam(PARAMETERS, 1e-2)
for epoch in range(6):
    for a, b in DataLoader(TensorDataset(x, y), 32, shuffle=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(head(body(a)), b).backward()
        optimizer.step()
"""


@pytest.mark.parametrize("whole", [True, False])
def test_a_head_of_its_own_that_no_optimiser_has(tmp_path, whole: bool):
    source = VERIFIED.replace(
        "PARAMETERS", "[*body.parameters(), *head.parameters()]" if whole else "body.parameters()"
    )
    verdicts, printed, _ = guard(source, tmp_path, **{"--only": "wiring"})
    assert verdicts["wiring"].blocks != whole, printed
    assert ("are in no optimiser" in printed) != whole


GRAPH = """
def train(epoch):
    output = model(features, adj)
    loss = F.nll_loss(LOSS)
    acc = accuracy(output[idx_train], labels[idx_train])
    loss.backward()
    acc_val = accuracy(output[idx_val], labels[idx_val])

idx_train, idx_val, idx_test = load()
for epoch in range(200):
    train(epoch)
"""
KEPT = """
best_err, best_acc = 100, 0
for epoch in range(10):
    err1, acc1 = validate(model)
    is_best = ERR
    best_err = min(err1, best_err)
    best = best_acc < acc1
    if is_best or best:
        torch.save(model, "best.pt")
"""


FLOW = """
class Flow(nn.Module):
    def forward(self, x):
        out, logdet = self.norm(x)
        out, det1 = self.mix(out)
        out, det2 = self.couple(out)
        logdet = logdet + TERMS
        return out, logdet

Flow()(x)[1].mean().backward()
"""


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        (FLOW.replace("TERMS", "det2"), "one of the terms is left out"),
        (FLOW.replace("TERMS", "det1 + det2"), ""),
        (GRAPH.replace("LOSS", "output, labels"), "the training rows alone"),
        (GRAPH.replace("LOSS", "output[idx_train], labels[idx_train]"), ""),
        (KEPT.replace("ERR", "err1 > best_err"), "the worst result is kept"),
        (KEPT.replace("ERR", "err1 <= best_err"), ""),
        (KEPT.replace("is_best = ERR", "no_best = err1 > best_err\n    is_best = not no_best"), ""),
    ],
)
def test_names_of_rows_and_best_results(tmp_path, source: str, cause: str):
    (tmp_path / "train.py").write_text(source)
    found = check(tmp_path / "train.py")
    assert found["ok"] != bool(cause), found
    assert cause in str(found)


@pytest.mark.parametrize(("share", "stops"), [(0.996, True), (0.004, False), (1.0, False)])
def test_an_average_whose_shares_are_exchanged(share: float, stops: bool):
    nets = [torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3))) for _ in range(2)]
    trained, average = nets
    pulled, parameters = Pulled(), list(trained.parameters())
    for _ in range(8):
        for p in parameters:
            p.data.add_(0.1 * torch.randn(p.shape, generator=DRAW))
        last = probe(parameters)
        for a, p in zip(average.parameters(), parameters, strict=True):
            a.data.mul_(1 - share).add_(share * p.data)
        pulled.between(parameters, last, probe(parameters), nets)
    assert (pulled.fault(lambda _: True) is not None) == stops


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("again", [True, False])
def test_two_views_that_are_one(again: bool, dropout: float):
    views, model = Views(), torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Dropout(dropout))
    for _ in range(8):
        x = torch.rand(4, 3, 8, 8, generator=DRAW)
        both = torch.cat([x, x if again else x.flip(3)])
        views.root([both], [model(both)], [])
    assert (views.fault() is not None) == (again and not dropout)  # R-Drop and SimCSE rely on dropout


CODEBOOK = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Quantize(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.randn(16, 4))

    def forward(self, z):
        at = torch.cdist(z, self.codes).argmin(1)
        if self.training:
            self.codes.index_add_(0, at, 0.01 * (z.detach() - self.codes[at]))
        return z + (self.codes[at] - z).detach()

torch.manual_seed(0)
data = TensorDataset(torch.randn(640, 8))
encoder, decoder, quantize = nn.Linear(8, 4), nn.Linear(4, 8), Quantize()
quantize.act = torch.sigmoid
model = nn.Sequential(encoder, quantize, decoder)
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
for epoch in range(3):
    for i, (x,) in enumerate(DataLoader(data, 16, shuffle=True)):
        optimizer.zero_grad()
        (model(x) - x).square().mean().backward()
        optimizer.step()
        if i % 100 == 0:
            model.eval()
            with torch.no_grad():
                model(x[:4])
            #BACK
            torch.save(model, "model.pt")
"""


@pytest.mark.parametrize("back", [True, False])
def test_a_codebook_that_eval_mode_leaves_as_it_is(tmp_path, back: bool):
    """The whole model is pickled, with a reference to a function that is followed."""
    source = CODEBOOK.replace("#BACK", "model.train()" if back else "pass")
    verdicts, printed, _ = guard(source, tmp_path, **{"--only": "modes"})
    assert verdicts["modes"].blocks != back, printed
    assert ("trains in eval mode" in printed) != back


@pytest.mark.parametrize("anew", [True, False])
def test_rates_that_begin_anew_in_epochs_that_were_cut(anew: bool):
    lengths = (37, 4, 4, 4)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    passes = [Namespace(training=True, ended=True, steps=n, started=at) for n, at in zip(lengths, starts, strict=True)]
    rates = [
        1e-5 * ((step if anew else start + step) + 1)
        for n, start in zip(lengths, starts, strict=True)
        for step in range(n)
    ]
    assert (restarted(passes, [rates]) is not None) == anew  # type: ignore[arg-type]


def test_a_table_of_numpy_goes_to_the_scratch_folder(tmp_path):
    """Numpy keeps the `open` of its own import."""
    (tmp_path / "losses.txt").write_text("mine")
    source = SPEECH.replace("SHUFFLE", "True").replace("import torch\n", "import numpy\nimport torch\n", 1)
    _, printed, _ = guard(source + '    numpy.savetxt("losses.txt", [1.0])\n', tmp_path, **{"--only": "files"})
    assert "written went to a scratch folder" in printed
    assert (tmp_path / "losses.txt").read_text() == "mine"
