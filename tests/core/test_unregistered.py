"""Parameters that a module keeps in a plain list or dict: the gate `wiring` names them, and only those that the loss uses."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import trainworthy

DRAWS = torch.Generator().manual_seed(0)
X = torch.randn(256, 8, generator=DRAWS)
DATA = TensorDataset(X, (X[:, 0] > 0).long())
HELD_OUT = TensorDataset(torch.randn(64, 8, generator=DRAWS), torch.randint(0, 2, (64,), generator=DRAWS))


class Net(nn.Module):
    """A classifier of 8 numbers with layers kept in `how`."""

    def __init__(self, how: str):
        super().__init__()
        layers = [nn.Linear(8, 8), nn.Linear(8, 8)]
        self.how, self.first, self.head = how, nn.Linear(8, 8), nn.Linear(8, 2)
        if how == "registered":
            self.layers = nn.ModuleList(layers)
        elif how == "by name":
            self.layers = {"a": layers[0], "b": layers[1]}
        elif how == "parameter":
            self.layers = [nn.Parameter(torch.eye(8))]
        elif how == "alias":
            self.layers = [self.first, self.first]
        else:
            self.layers = [layer.requires_grad_(how != "frozen") for layer in layers]

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for layer in self.layers.values() if isinstance(self.layers, dict) else self.layers:
            more = h @ layer if isinstance(layer, nn.Parameter) else layer(h)
            h = h + F.relu(more.detach() if self.how == "reference" else more)
        return self.head(h)


@torch.no_grad()
def accuracy(model: nn.Module, loader) -> float:
    return sum((model(x).argmax(1) == y).sum().item() for x, y in loader) / len(loader.dataset)


def wiring(how: str):
    """The verdict of the gate."""

    def factory() -> trainworthy.Script:
        model = Net(how)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        loss = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])  # noqa: E731
        return trainworthy.Script(
            model=model, optimizer=optimizer, train=DATA, val=HELD_OUT, loss=loss, metric=accuracy, classes=2
        )

    (verdict,) = trainworthy.check(factory, only="wiring", raises=False).verdicts
    return verdict


@pytest.mark.parametrize(("how", "words"), [
    ("list", "the loss uses 4 parameter tensors that the model does not list, e.g. layers[0].weight"),
    ("by name", "the loss uses 4 parameter tensors that the model does not list, e.g. layers[0].weight"),
    ("parameter", "the loss uses 1 parameter tensors that the model does not list, e.g. layers[0]"),
])  # fmt: skip
def test_parameters_in_a_plain_list_are_named(how: str, words: str):
    verdict = wiring(how)
    assert verdict.verdict == "fail", verdict
    assert words in verdict.measured, verdict
    assert "modules are kept in a plain list or dict" in verdict.remedy, verdict


@pytest.mark.parametrize("how", ["registered", "alias", "frozen", "reference"])
def test_no_alarm_where_nothing_is_lost(how: str):
    """In a ModuleList, the same layer again, frozen layers, and an output without a gradient (a teacher's, a target net's)."""
    verdict = wiring(how)
    assert verdict.verdict == "pass", verdict
