"""A model that computes its own loss, and gets the same tokens as input and as target."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from trainworthy.guard.checks import forced


class Language(nn.Module):
    """Losses (T, N) of each place, of a recurrent net that reads time first."""

    def __init__(self, *, shifts: bool = False, both: bool = False):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.cell, self.head = nn.GRU(8, 16, bidirectional=both), nn.Linear(32 if both else 16, 20)
        self.shifts = shifts

    def forward(self, data, target):
        x = self.embed(data)
        if self.shifts:
            x = F.pad(x, (0, 0, 0, 0, 1, 0))[:-1]
        return F.cross_entropy(self.head(self.cell(x)[0]).movedim(-1, 1), target, reduction="none")


@pytest.mark.parametrize(
    ("net", "same", "found"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"shifts": True}, True, False),  # the model shifts by itself
        ({"both": True}, True, False),  # an autoencoder: all places are read
    ],
)
def test_a_loss_that_follows_its_own_token(net, same, found):
    torch.manual_seed(0)
    ids = torch.randint(0, 20, (13, 5))
    data, target = ids[:-1], (ids[:-1] if same else ids[1:]).clone()
    seen = SimpleNamespace(control=object(), several={0: (Language(**net), (data, target), {})})
    assert bool(forced.copied(seen)) == found
