"""A loss that changes the model's logits before their softmax: the exported model returns them unchanged."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from trainworthy.recipes.llm.gates.pretrain import OUTSIDE, _changed_logits


@pytest.mark.parametrize(
    ("change", "seen"),
    [(lambda x: x, False), (lambda x: 30 * (x / 30).tanh(), True), (lambda x: x / 2, True)],
    ids=["as they are", "capped", "temperature"],
)
def test_logits_that_the_loss_changes_are_found(change, seen: bool):
    logits = 5 * torch.randn(2, 7, 11)

    def loss(_model, _batch) -> dict[str, Tensor]:
        return {"ce": change(logits[:, :-1].float()).logsumexp(-1).sum()}

    found = _changed_logits(SimpleNamespace(loss=loss, model=None), {}, logits[:, :-1])
    assert (found is not None) == seen
    if seen:
        assert torch.equal(found, change(logits[:, :-1]))


def test_a_loss_over_flat_rows_is_not_compared():
    logits = torch.randn(2, 7, 11)

    def loss(_model, _batch) -> dict[str, Tensor]:
        return {"ce": F.cross_entropy(logits[:, :-1].flatten(0, 1), torch.zeros(12, dtype=torch.long), reduction="sum")}

    assert _changed_logits(SimpleNamespace(loss=loss, model=None), {}, logits[:, :-1]) is None


@pytest.mark.verify
def test_the_first_cause_of_capped_logits(launch, fork):
    old = "        log_z = logits.logsumexp(-1)\n"
    fork((old, "        logits = 30 * (logits / 30).tanh()\n" + old), recipe="llm/pretrain")
    done = launch("check", "mine.py", "--only", "formula", code=3)
    verdict = next(v for v in done.verdicts() if v["id"] == "formula")
    assert OUTSIDE in verdict["remedy"].splitlines()[0], verdict["remedy"]
