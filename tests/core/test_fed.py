"""Loss and evaluation hand a sample to the model in the same way."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from trainworthy.core.gates.checks.model_inputs import compare_inputs

from tests.core.test_pairing import Pictures
from tests.helpers.set_cases import digits


class Net(nn.Module):
    """A linear classifier of pictures."""

    def __init__(self, n: int, dropped: float = 0.0, own=lambda x, training: x):
        super().__init__()
        self.drop, self.head, self.own = nn.Dropout(dropped), nn.Linear(n, 10), own

    def forward(self, x):
        return self.head(self.drop(self.own(x, self.training)).flatten(1))


def judged(learnt=lambda x: x, scored=lambda x: x, **net) -> str:
    """What is said of a loss and an evaluation that change pictures before the model."""
    images, labels = digits()
    colours = torch.stack([images[:40], images[100:140], images[200:240]], 1)
    data, model = Pictures(colours, labels[:40]), Net(3 * 28 * 28, **net)

    def measure(stage, view, probe):
        batch = view.collate([view.get(i, None) for i in range(len(view))])
        with torch.no_grad():
            model.eval()
            return {"n": model(scored(batch["image"])).sum().item()}

    stage = SimpleNamespace(
        data={"train": data}, model=model, eval_model=model, loss=lambda m, b: {"ce": m(learnt(b["image"])).sum()}
    )
    run = SimpleNamespace(world=1, device=torch.device("cpu"), autocast=contextlib.nullcontext, measure=measure)
    found = compare_inputs(run, stage, [0, 3, 5, 9, 12, 20, 30, 35])
    return " ".join(found) if found else ""


@pytest.mark.parametrize(
    ("change", "word"),
    [(lambda x: (x - x.mean((1, 2, 3), keepdim=True)) / x.std((1, 2, 3), keepdim=True), "scale"),
     (lambda x: x / 255, "scale"), (lambda x: x * 2 - 1, "scale"), (lambda x: x.flip(1), "channels")],
)  # fmt: skip
def test_another_input_in_the_loss_is_stopped(change, word):
    assert word in judged(learnt=change)
    assert word in judged(scored=change)


def test_a_scale_of_training_mode_alone_is_stopped():
    assert "scale" in judged(own=lambda x, training: x * 255 if training else x)


@pytest.mark.parametrize(
    "same",
    [{}, {"learnt": lambda x: x + 0.05 * torch.randn_like(x)}, {"learnt": lambda x: torch.randn_like(x)}, {"dropped": 0.1},
     {"dropped": 0.5}, {"scored": lambda x: x.flip(3)}, {"learnt": lambda x: x[..., ::2].repeat_interleave(2, -1)}],
)  # fmt: skip
def test_noise_dropout_mirrors_and_coarse_pictures_are_let_through(same):
    assert judged(**same) == ""
