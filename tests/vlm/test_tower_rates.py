"""`rates` of vlm/instruct: one rate for all towers may be the language model's own."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from trainworthy.recipes.vlm.gates import towers


@pytest.mark.parametrize(
    ("projector", "language", "ok"), [(1e-3, 5e-4, True), (1e-3, 1e-3, False), (5e-4, 5e-4, True), (1e-5, 1e-5, True)]
)
def test_one_rate_for_all_is_the_language_models(projector: float, language: float, ok: bool):
    model = nn.ModuleDict({"encoder": nn.Linear(2, 2), "projector": nn.Linear(2, 2), "language": nn.Linear(2, 2)})
    groups = [
        {"params": [*model[t].parameters()], "lr": rate, "name": t}
        for t, rate in (("projector", projector), ("language", language))
    ]
    stage = SimpleNamespace(model=model, optimizers={"main": torch.optim.AdamW(groups)})
    found = towers.Watched(SimpleNamespace(), stage, {"projector": [0.01], "language": [0.001]})
    context = SimpleNamespace(cfg=SimpleNamespace(language_lr=5e-4), once=lambda *_: found)
    assert towers.rates.check(context).ok is ok
