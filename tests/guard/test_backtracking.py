"""By the script's source: best paths in the wrong order, reshaped pairs, one input read twice, a scaler that a function fits again."""

from pathlib import Path

import pytest
from trainworthy.guard.checks import names

from tests.conftest import patched

OWN_LAST = """
import torch


def decode(scores, transitions):
    best, back = scores[0], []
    for score in scores[1:]:
        best, origin = (best.unsqueeze(1) + transitions).max(dim=0)
        best = best + score
        back.append(origin)
    path = [best.argmax().item()]
    for origin in reversed(back):
        path.append(origin[path[-1]].item())
    return path[::-1]


print(decode(torch.randn(5, 3), torch.randn(3, 3)))
"""
OWN_NAME = """
import torch


def argmax(scores):
    return int(scores.argmax())


def decode(rows, transitions):
    alpha, history = rows[0], []
    for row in rows[1:]:
        pointers = []
        for tag in range(3):
            came = argmax(alpha + transitions[tag])
            pointers.append(came)
        alpha = alpha + row
        history.append(pointers)
    tag = argmax(alpha)
    found = [tag]
    for step in reversed(history):
        tag = step[tag]
        found.append(tag)
    found.reverse()
    return found


print(decode(torch.randn(5, 3), torch.randn(3, 3)))
"""
EDGES = """
import numpy as np
import torch

links = np.argwhere(np.random.rand(9, 9) < 0.3)
train = torch.tensor(links[4:].T, dtype=torch.long)
grid = torch.arange(12).reshape(2, -1)
"""
SCALED = """
import torch
from sklearn.preprocessing import StandardScaler

scaler = StandardScaler().fit(x_train)


def tensor(rows):
    return torch.tensor(scaler.transform(rows))


train, val = tensor(x_train), tensor(x_val)
"""
PAIR = """
import torch


class Twins(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.drop = torch.nn.Linear(3, 2), torch.nn.Dropout(0.1)

    def forward(self, first, second):
        one = self.net(self.drop(first))
        a = self.net(first)
        b = self.net(second)
        return one, (a - b).abs()


print(Twins()(torch.randn(2, 3), torch.randn(2, 3)))
"""
FITTED = SCALED.replace("scaler.transform(rows)", "scaler.fit_transform(rows)")
CAUSES = {
    "reversed(back) is meant": patched(OWN_LAST, ("in reversed(back)", "in back")),
    "path[::-1] is meant": patched(OWN_LAST, ("return path[::-1]", "return path")),
    "reversed(history) is meant": patched(OWN_NAME, ("in reversed(history)", "in history")),
    "found[::-1] is meant": patched(OWN_NAME, ("    found.reverse()\n", "")),
    "a transpose (.T) is meant": patched(EDGES, ("links[4:].T", "links[4:].reshape(2, -1)")),
    "next to the second half": EDGES.replace("torch.tensor(links[4:].T, ", "torch.from_numpy(links).view(2, -1).to("),
    "scaler.transform(...) is meant": FITTED,
    "self.net(second) is meant": patched(PAIR, ("self.net(second)", "self.net(first)")),
}
HEALTHY = {
    "last": OWN_LAST,
    "name": OWN_NAME,
    "reversed by the caller": patched(
        OWN_LAST,
        ("return path[::-1]", "return path"),
        ("print(decode(", "print(reversed(decode("),
        ("3, 3)))", "3, 3))))"),
    ),
    "a walk forwards": OWN_LAST.replace("max(dim=0)", "sort(dim=0)").replace("in reversed(back)", "in back"),
    "edges": EDGES,
    "two inputs": PAIR,
    "two views of one input": PAIR.replace("second", "lengths").replace("self.net(lengths)", "self.net(first)"),
    "a changed input": PAIR.replace("b = self.net(second)", "first = first.flip(0)\n        b = self.net(first)"),
    "two rows of a flat array": EDGES.replace("np.argwhere(np.random.rand(9, 9) < 0.3)", "np.arange(18)").replace(
        ".T", ".reshape(2, -1)"
    ),
    "scaled": SCALED,
    "fitted on request": FITTED.replace(
        "(rows):", "(rows, fit=False):\n    if not fit:\n        return scaler.transform(rows)"
    ),
    "series of their own": FITTED.replace("x_train)", "prices)").replace("x_val)", "volumes)"),
    "a scaler of its own": FITTED.replace("    return", "    scaler = StandardScaler()\n    return"),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_a_wrong_order_or_fit_is_named(cause: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(CAUSES[cause])
    found = names.check(tmp_path / "train.py")
    assert not found["ok"]
    assert cause in found["cause"]


@pytest.mark.parametrize("name", HEALTHY)
def test_the_right_order_and_fit_pass(name: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HEALTHY[name])
    assert names.check(tmp_path / "train.py")["ok"]
