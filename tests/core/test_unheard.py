"""Parameters without a gradient: a weight of 0, an output that is not used and a detach() are told apart by experiment."""

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


class Two(nn.Module):
    """A body with batch norm, a classifier and a second head."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.head, self.aux = nn.Linear(16, 2), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found = self.body(x)
        return self.head(found), self.aux(found)


@torch.no_grad()
def accuracy(model: nn.Module, loader) -> float:
    return sum((model(x)[0].argmax(1) == y).sum().item() for x, y in loader) / len(loader.dataset)


def cause(second: str) -> str:
    """What wiring names for a loss with this second part."""

    def loss(model: nn.Module, batch: list) -> Tensor:
        logits, again = model(batch[0])
        parts = {
            "weighted": 0.0 * F.mse_loss(again, batch[0]),
            "unused": 0.0,
            "detached": F.mse_loss(again.detach(), batch[0]),
        }
        return F.cross_entropy(logits, batch[1]) + parts[second]

    def factory() -> trainworthy.Script:
        model = Two()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        return trainworthy.Script(
            model=model, optimizer=optimizer, train=DATA, val=HELD_OUT, loss=loss, metric=accuracy, classes=2
        )

    (verdict,) = trainworthy.check(factory, only="wiring", raises=False).verdicts
    assert verdict.verdict == "fail", verdict
    assert "aux.weight" in verdict.measured
    return verdict.remedy.splitlines()[0]


@pytest.mark.parametrize(("second", "words"), [
    ("weighted", "the part of the loss that uses aux.weight has the weight 0: other values of aux.weight leave the loss at"),
    ("unused", "the loss does not use aux.weight"),
    ("detached", "a detach(), no_grad() or argmax cuts the graph"),
])  # fmt: skip
def test_the_cause_of_a_part_without_gradient_is_measured(second: str, words: str):
    assert cause(second).startswith(words)
