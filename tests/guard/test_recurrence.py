"""Sequence models and the batches they are trained on: each wrong step is named, the healthy script passes."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from trainworthy.guard.checks.loss import one_class
from trainworthy.guard.measures.losses.supervision import shared_target, upside_down
from trainworthy.guard.measures.losses.targets import describe
from trainworthy.guard.measures.models.kept_states import States
from trainworthy.guard.measures.models.rows import rows_of

from tests.guard.guarding import guard

REVERSED = """
import random
import sys
import torch
from torch import nn

seed = int(sys.argv[1])
torch.manual_seed(seed)
random.seed(seed)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(12, 16)
        self.encoder = nn.LSTM(16, 32, batch_first=True)
        self.cell = nn.LSTMCell(16 + 32, 32)
        self.out = nn.Linear(32, 12)

    def forward(self, source, target):
        states, (h, c) = self.encoder(self.tokens(source))
        h, c, scores = h[0], c[0], []
        token = torch.full((len(source),), 11)
        for t in range(target.size(1)):
            weights = (states @ h.unsqueeze(2)).squeeze(2).softmax(1)
            read = (weights.unsqueeze(2) * states).sum(1)
            h, c = self.cell(torch.cat([self.tokens(token), read], 1), (h, c))
            scores.append(self.out(h))
            token = target[:, t] if random.random() < 0.5 else scores[-1].argmax(1)
        return torch.stack(scores, 1)

def draw(n):
    source = torch.randint(0, 10, (n, 6))
    return source, torch.cat([source.flip(1), torch.full((n, 1), 10)], 1)

net = Net()
optimizer = torch.optim.Adam(net.parameters(), 3e-3)
for step in range(300):
    source, target = draw(32)
    loss = nn.functional.cross_entropy(net(source, target).flatten(0, 1), target.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
GIVEN = REVERSED.replace("for t in range(target.size(1)):", """for t in range(target.size(1)):
            token = target[:, t] if random.random() < 0.5 else token""")  # fmt: skip
WRONG = {
    "state": ("wiring", REVERSED.replace("h, c = self.cell", "h, _ = self.cell"), "thrown away"),
    "answer": ("dependency", GIVEN, "the token that it must predict"),
    "batch": ("dependency", REVERSED.replace("softmax(1)", "softmax(0)"), "mixes samples"),
    "seed": ("passes", REVERSED.replace("    source = torch.randint", "    torch.manual_seed(seed)\n    source = torch.randint"), "set it once"),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
def test_a_decoder_that_is_stepped_wrongly_is_named(tmp_path, kind: str):
    check, source, cause = WRONG[kind]
    verdicts, printed, _ = guard(source, tmp_path, "0", interventions=False)
    assert verdicts[check].verdict == "fail", printed
    assert cause in verdicts[check].remedy, printed


def test_a_healthy_decoder_passes(tmp_path):
    verdicts, printed, _ = guard(REVERSED, tmp_path, "0", interventions=False)
    assert not [v.id for v in verdicts.values() if v.verdict == "fail"], printed
    assert "with the target at that position" in printed
    assert "without the other half" in printed


TOKENS = """
import sys
import numpy as np
import torch
from torch import nn

torch.manual_seed(int(sys.argv[1]))
rng = np.random.default_rng(0)
text = np.cumsum(rng.integers(1, 4, 20000)) % 40 + 1
# separators
text.astype(np.uint16).tofile("tokens.bin")
data = np.fromfile("tokens.bin", dtype=np.uint16)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.gru, self.out = nn.Embedding(64, 16), nn.GRU(16, 32, batch_first=True), nn.Linear(32, 64)

    def forward(self, x):
        return self.out(self.gru(self.tokens(x))[0])

net = Net()
optimizer = torch.optim.Adam(net.parameters(), 3e-3)
for step in range(300):
    at = torch.randint(len(data) - 33, (16,))
    # rows
    rows = torch.stack([torch.from_numpy(data[i : i + 33].astype(np.int64)) for i in at])
    loss = nn.functional.cross_entropy(net(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
SEPARATED = TOKENS.replace("# separators", "text = np.stack([text, 0 * text], 1).flatten()").replace(
    "# rows", "at = 2 * (at // 2)"
)


@pytest.mark.parametrize("kind", ["bytes", "right", "separators"])
def test_numbers_of_two_bytes_that_are_read_as_bytes(tmp_path, kind: str):
    wrong = TOKENS.replace("dtype=np.uint16)", "dtype=np.uint8)")
    source = {"bytes": wrong, "right": TOKENS, "separators": SEPARATED}[kind]
    verdicts, printed, _ = guard(source, tmp_path, "0", interventions=False)
    failed = [v.id for v in verdicts.values() if v.verdict == "fail"]
    assert failed == (["targets"] if kind == "bytes" else []), printed
    assert ("narrower type" in printed) == (kind == "bytes")


@pytest.mark.parametrize(("share", "weight", "wrong"), [(0.1, 9.0, False), (0.1, 1 / 9, True), (0.5, 1.0, False)])
@pytest.mark.parametrize("shape", [(400,), (400, 1)])
def test_one_weight_of_all_positives(share: float, weight: float, wrong: bool, shape: tuple):
    target = (torch.arange(400) < 400 * share).float().view(shape)
    row = describe(
        "binary_cross_entropy_with_logits", torch.randn(shape), target, {"pos_weight": torch.tensor(weight)}, None
    )
    assert (upside_down([row] * 6) is not None) == wrong


@pytest.mark.parametrize(
    ("kept", "steps", "computed"), [(True, 5, True), (False, 5, True), (False, 3, True), (False, 5, False)]
)
def test_states_of_a_layer_that_is_called_step_by_step(kept: bool, steps: int, computed: bool):
    one, layer = States(), nn.GRU(4, 6, batch_first=True)
    for window in range(4):
        state = torch.zeros(1, 2, 6, requires_grad=True) * 1.0 if computed else torch.zeros(1, 2, 6)
        for _ in range(steps):
            x = torch.randn(2, 1, 4)
            one.call(layer, (x, state), window)
            new = layer(x, state)[1]
            state = new if kept else state
    assert (one.fault() == "GRU") == (not kept and steps > 3 and computed)


def test_series_and_nets_of_no_steps_have_no_state_to_keep():
    one, layer, state = States(), nn.GRU(4, 6, batch_first=True), torch.zeros(1, 2, 6, requires_grad=True) * 1.0
    for window in range(4):
        for _ in range(6):
            one.call(layer, (torch.randn(2, 7, 4), state), window)
            one.call(layer, (torch.randn(2, 1, 4),), window)
            one.call(nn.Linear(4, 4), (torch.randn(2, 4),), window)
    assert one.fault() == ""


def test_rows_are_known_by_texts_of_other_lengths_alone():
    ids = torch.zeros(8, 5, dtype=torch.int64)
    assert rows_of([ids, ids.new_zeros(8, 7)]) == 8
    assert rows_of([ids, ids]) == rows_of([ids]) == rows_of([ids, torch.zeros(8, 7)]) == 0
    assert rows_of([ids.t(), ids.new_zeros(7, 8)]) == 0


@pytest.mark.parametrize("kind", ["one", "own", "first", "loop", "none", "rare"])
def test_a_target_that_all_samples_share(kind: str):
    one = torch.tensor([0.0, 1, 0, 0, 1, 0])
    target = {"one": one.repeat(32, 1), "own": (torch.rand(32, 6) < 0.3).float(), "first": one.sort(descending=True).values.repeat(32, 1),
              "loop": torch.ones(32, 1), "none": torch.zeros(32, 6), "rare": torch.zeros(32, 1)}[kind]  # fmt: skip
    row = describe("binary_cross_entropy_with_logits", torch.randn(target.shape), target, {}, None)
    assert (shared_target([row] * 4) is not None) == (kind == "one")
    assert (shared_target([row] * 20) is not None) == (kind in ("one", "none"))


@pytest.mark.parametrize("kind", ["product", "scaled", "positive first", "queue", "weights", "labels"])
def test_zeros_as_labels_of_the_products_of_a_batch(kind: str):
    a, b = (torch.randn(12, 5, requires_grad=True) for _ in range(2))
    u, v = F.normalize(a), F.normalize(b)
    products = u @ v.t()
    scores = {
        "scaled": torch.ones([], requires_grad=True).exp() * products.t(),
        "positive first": torch.cat([(u * v).sum(1, keepdim=True), u @ v[1:].detach().t()], 1) / 0.1,
        "queue": torch.cat([products.diag()[:, None], u @ torch.randn(5, 30)], 1),
        "weights": u @ b.t(),
    }.get(kind, products)
    target = torch.arange(12) if kind == "labels" else torch.zeros(12, dtype=torch.int64)
    row = describe("cross_entropy", scores.detach(), target, {}, None, scores.grad_fn) | {"layer": False}
    assert (one_class([row] * 6) is not None) == (kind in ("product", "scaled"))
