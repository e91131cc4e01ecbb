"""The loss on a teacher's features against its formula."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional
from trainworthy.core.gates.checks import formula
from trainworthy.recipes.distill import whisper
from trainworthy.recipes.distill.gates import feature_formula

CFG = whisper.tiny()


def compared(loss) -> formula.Comparison:
    torch.manual_seed(0)
    batch = {
        "envelope": torch.randn(5, 30, 16),
        "features": torch.randn(5, 30, 24),
        "span": torch.tensor([30, 12, 7, 1, 20]),
    }
    student = nn.Linear(16, 24)
    stage = SimpleNamespace(model=student, loss=lambda m, b: loss(m(b["envelope"]), b))
    run = SimpleNamespace(autocast=contextlib.nullcontext, precision="fp32", cfg=CFG)
    stated = lambda: feature_formula.features(SimpleNamespace(cfg=CFG), stage, batch)  # noqa: E731
    return formula.compared(run, stage, batch, stated)


def test_the_recipes_loss_is_let_through():
    found = compared(lambda ours, b: whisper.alike(CFG, ours, b))
    assert (found.wrong, len(found.remarks)) == ([], 2)


def test_a_term_has_the_weight_that_its_setting_says(monkeypatch):
    """A factor that the setting follows is no choice of the fork's; one that it does not follow may be."""
    monkeypatch.setattr(CFG, "mse", 0.5)
    found = compared(
        lambda ours, b: whisper.alike(CFG, ours, b) | {"mse": whisper.alike(CFG, ours, b)["mse"] / CFG.mse**2}
    )
    assert "with twice the setting mse the term is 0.5 times as large" in " ".join(found.wrong)
    found = compared(lambda ours, b: whisper.alike(CFG, ours, b) | {"mse": 4 * whisper.alike(CFG, ours, b)["mse"]})
    assert "follows the setting mse, and is 4 times what that says" in " ".join(found.wrong)
    found = compared(
        lambda ours, b: whisper.alike(CFG, ours, b) | {"mse": 3 * whisper.alike(CFG, ours, b)["mse"] / CFG.mse}
    )
    assert found.wrong == []
    assert CFG.mse == 0.5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda ours, b: whisper.alike(CFG, ours, {**b, "span": torch.full_like(b["span"], 30)}),
            "after the recording's end",
        ),
        (lambda ours, b: {**whisper.alike(CFG, ours, b), "cosine": -whisper.alike(CFG, ours, b)["cosine"]}, "sign"),
        (
            lambda ours, b: whisper.alike(CFG, ours, {**b, "features": b["features"].roll(1, 1)}),
            "not least at the teacher's",
        ),
        (lambda ours, b: whisper.alike(CFG, ours.detach() + 0 * ours, b), "detach()"),
    ],
)
def test_mistakes_are_stopped(change, words):
    found = compared(change)
    assert found.wrong
    assert words in " ".join(found.causes)


def robust(ours, batch, error, name="mse", rolled=0):
    """The recipe's loss with another error than the squared one."""
    mask = whisper.speech(batch)
    each = error(ours, batch["features"].roll(rolled, 1), reduction="none").mean(-1)
    return {name: CFG.mse * (each * mask).sum(), "cosine": whisper.alike(CFG, ours, batch)["cosine"]}


@pytest.mark.parametrize("error", [functional.smooth_l1_loss, functional.l1_loss])
@pytest.mark.parametrize("name", ["mse", "robust"])
def test_another_error_is_let_through(error, name):
    found = compared(lambda ours, b: robust(ours, b, error, name))
    assert found.wrong == []
    assert "pulls each sample to its target" in " ".join(found.remarks)


def test_another_error_to_other_frames_is_stopped():
    found = compared(lambda ours, b: robust(ours, b, functional.smooth_l1_loss, rolled=1))
    assert "not least at the teacher's" in " ".join(found.causes)


def test_another_error_that_counts_padding_is_stopped():
    found = compared(
        lambda ours, b: robust(ours, {**b, "span": torch.full_like(b["span"], 30)}, functional.smooth_l1_loss)
    )
    assert "after the recording's end" in " ".join(found.causes)


def named(ours, batch, rolled=0):
    """Both terms of other forms and names: the absolute error, and the error of the differences between frames."""
    mask, theirs = whisper.speech(batch).float(), batch["features"].roll(rolled, 1)
    steps = (ours.diff(dim=1) - theirs.diff(dim=1)).square().mean(-1)
    return {"l1": ((ours - theirs).abs().mean(-1) * mask).sum(), "delta": 0.1 * (steps * mask[:, 1:]).sum()}


def test_terms_that_all_have_other_names_are_compared_together():
    assert compared(named).wrong == []
    assert "not least at the teacher's" in " ".join(compared(lambda ours, b: named(ours, b, rolled=1)).causes)


def test_two_of_three_terms_may_have_other_names():
    due = {k: formula.Statement({k: torch.ones(2)}, own=lambda k=k: f"{k} is wrong") for k in ("a", "b", "c")}
    terms = {"a": torch.ones(2), "x": torch.full((2,), 3.0), "y": torch.zeros(2)}
    got, whole, stated, own = formula.paired(terms, {k: v.sum() for k, v in terms.items()}, due)
    assert (got["loss"].tolist(), whole["loss"], [*stated], own) == ([3, 3], 6, ["a", "loss"], [])
    assert next(iter(stated["loss"].right.values())).tolist() == [2, 2]
    assert stated["loss"].own() == "b is wrong"
    due["b"].own = None  # a term that has one form alone may not be absent
    assert formula.paired(terms, terms, due)[0]["b"].tolist() == [0, 0]
