"""What wrote to a frozen part: each way is named by what was measured, and a part that stays is no fault."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from trainworthy.core.gates.causes.frozen import limits

import trainworthy
from tests.core.test_check import script, train_epoch
from tests.core.test_learning import verdict


class Held(nn.Module):
    """A net that stays near a frozen reference, with batch norm in both."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))
        self.reference = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))
        self.reference.load_state_dict(self.net.state_dict())
        self.reference.requires_grad_(False)

    def train(self, mode: bool = True):
        super().train(mode)
        self.reference.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Thawed(Held):
    def train(self, mode: bool = True):
        return nn.Module.train(self, mode)


def loss(model: Held, batch: list) -> Tensor:
    found = model(batch[0])
    return F.cross_entropy(found, batch[1]) + 0.01 * (found - model.reference(batch[0])).square().mean()


def copies_after(model, optimizer, batches) -> None:
    train_loop(model, optimizer, batches)
    model.reference.load_state_dict(model.net.state_dict())


def copies_before(model, optimizer, batches) -> None:
    """The reference of each pass is the net at its start: it never equals the net of the end."""
    model.reference.load_state_dict(model.net.state_dict())
    train_loop(model, optimizer, batches)


def averages(model, optimizer, batches) -> None:
    train_loop(model, optimizer, batches)
    with torch.no_grad():
        for old, new in zip(model.reference.parameters(), model.net.parameters(), strict=True):
            old.lerp_(new, 0.1)


def train_loop(model, optimizer, batches) -> None:
    model.train()
    for batch in batches:
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()


def steps_it_too(model, optimizer, batches) -> None:
    model.reference.requires_grad_(True)
    own = torch.optim.SGD(model.reference.parameters(), lr=0.1)
    model.train()
    for batch in batches:
        optimizer.zero_grad()
        own.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
        own.step()


def factory(loop, model=Held):
    def made() -> trainworthy.Script:
        built = script(model, loss=loss, train_loop=loop, frozen=("reference.",))()
        built.optimizer = torch.optim.AdamW(built.model.net.parameters(), lr=2e-3)
        return built

    return made


@pytest.mark.parametrize(
    ("loop", "model", "cause"),
    [
        (copies_after, Held, "the loop copies trained weights into frozen ones"),
        (copies_before, Held, "the loop copies trained weights into frozen ones"),
        (averages, Held, "no optimiser steps any of 6 frozen tensors that moved"),
        (steps_it_too, Held, "an optimiser steps 6 of"),
        (train_loop, Thawed, "batch norm of a frozen part runs in train mode"),
    ],
)
def test_what_wrote_to_a_frozen_part_is_the_first_cause(loop, model, cause: str):
    found = verdict(factory(loop, model), "wiring")
    assert found.verdict == "fail"
    assert "frozen tensors moved" in found.measured
    assert cause in found.cause, found.cause


@pytest.mark.parametrize("loop", [train_loop, train_epoch])
def test_a_frozen_part_that_stays_is_no_fault(loop):
    found = verdict(factory(loop), "wiring")
    assert found.verdict == "pass", found.measured


def test_a_frozen_majority_is_a_cause_of_samples_that_are_not_memorised():
    """A projector in front of a frozen language model that never learnt the answers."""
    net = nn.ModuleDict({"projector": nn.Linear(4, 4), "language": nn.Linear(40, 40)})
    assert limits(dict(net.named_parameters())) == ""
    net["language"].requires_grad_(False)
    assert limits(dict(net.named_parameters())).startswith(
        "only 1.2% of the weights train (projector), and the frozen rest (language)"
    )
    net["projector"].requires_grad_(False)
    assert limits(dict(net.named_parameters())) == ""
