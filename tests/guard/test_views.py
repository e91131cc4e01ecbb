"""Two views of each sample in a batch."""

from collections import deque

import pytest
import torch
from trainworthy.guard.hooks.addresses import address_of
from trainworthy.guard.measures.data.views import Views


def fault(*calls, ahead: int = 0):
    """The verdict on ten batches of two views (8, 3, 4, 4), a mask of their shape and labels; `calls`: entries that a model gets."""
    views, places = Views(), deque(maxlen=4)
    batches = [[torch.rand(8, 3, 4, 4), torch.rand(8, 3, 4, 4), torch.arange(8)] for _ in range(10)]

    def draw(batch):
        views.batch(batch)
        places.append({address_of(x): i for i, x in enumerate(batch)})

    for batch in batches[:ahead]:
        draw(batch)
    for i, batch in enumerate(batches):
        if i + ahead < len(batches):
            draw(batches[i + ahead])
        for given in calls:
            views.root([batch[k] for k in given], [], places)
    return views.fault()


@pytest.mark.parametrize("ahead", [0, 2])
def test_the_same_view_twice(ahead):
    assert "entry 0 twice, and never entry 1" in fault((0, 0), ahead=ahead)[0]
    assert fault((0,), (0,), ahead=ahead)
    assert fault((0, 1), ahead=ahead) is None
    assert fault((0,), (1,), ahead=ahead) is None


def test_an_entry_that_no_model_gets_may_be_a_target():
    assert fault((0,)) is None
    assert fault((0,), (0,), (1,)) is None
