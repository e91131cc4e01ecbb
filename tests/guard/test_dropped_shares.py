"""The share to keep, given to dropout as the share to drop; and heavy dropout that is meant."""

import pytest

from tests.conftest import patched
from tests.guard.guarding import guard

NET = """
import argparse
import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--dropout", type=float, default=0.2)
args = parser.parse_args()
RATE = None

class Net(nn.Module):
    def __init__(self, width=32, KEEP=0.8):
        super().__init__()
        self.first, self.last = nn.Linear(6, width), nn.Linear(width, 2)
        self.words, self.drop = nn.Identity(), nn.Dropout(args.dropout)

    def forward(self, x):
        return self.last(self.drop(torch.relu(self.first(self.words(x)))))

torch.manual_seed(0)
x = torch.randn(128, 6)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long()), 16, shuffle=True)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(5):
    model.train()
    for a, b in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(a), b).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        right = sum((model(a).argmax(1) == b).sum().item() for a, b in loader)
"""
LAYER = "nn.Dropout(args.dropout)"
FUNCTION = "self.drop(torch.relu(self.first(self.words(x))))"
CASES = [
    ("rest of the rate", [(LAYER, "nn.Dropout(1 - args.dropout)")], True),
    ("keep_prob", [("KEEP=0.8", "keep_prob=0.9"), (LAYER, "nn.Dropout(keep_prob)")], True),
    ("functional", [("RATE = None", "KEEP_PROB = 0.75"), (FUNCTION, "F.dropout(torch.relu(self.first(x)), KEEP_PROB, self.training)")], True),
    ("as it is", [], False),
    ("1 - keep_prob", [("KEEP=0.8", "keep_prob=0.9"), (LAYER, "nn.Dropout(1 - keep_prob)")], False),
    ("heavy", [("default=0.2", "default=0.85")], False),
    ("words as well", [("nn.Identity()", "nn.Dropout1d(0.8)")], False),
    ("a number", [(LAYER, "nn.Dropout(0.9)")], False),
    ("other names", [("KEEP=0.8", "dropout_words=0.9, word_dropout=0.9"), ("nn.Identity()", "nn.Dropout(word_dropout)")], False),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "stopped"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_the_share_that_is_dropped(changes, stopped: bool, tmp_path):
    verdicts, printed, _ = guard(patched(NET, *changes), tmp_path, interventions=False)
    assert verdicts["modes"].verdict == ("fail" if stopped else "pass"), printed
    assert ("dropout gets the keep probability" in printed) == stopped
