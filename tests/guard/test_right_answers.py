"""Right answers in the place of a model's: what a script then prints tells whether it compares them with what they are for."""

from collections import deque
from types import SimpleNamespace

import pytest
import torch
from trainworthy.guard.checks.results import ENDED
from trainworthy.guard.checks.right_answers import Answers, check, printed, suitable
from trainworthy.guard.rehearsals.rehearsal import Outcome


def ran(text: str, *, answered: int = 4, varied: bool = True) -> Outcome:
    """A run that evaluated once, and printed a text after it."""
    row = {"calls": 4, "answered": answered, "rows": 400, "varied": varied, "output_span": [0, -1]}
    return Outcome(record={"answers": [row], "why": ENDED, "progress": {}}, output=text)


@pytest.mark.parametrize(("own", "right", "wrong", "stopped"), [
    ("test mae 9.10", "test mae 0.00", "", False),
    ("test mae 48.10", "test mae 47.90", "test mae 48.00", True),
    ("test mae 9.10", "test mae 3.00", "test mae 14.00", False),  # it is compared with clean values, and learnt from noisy ones
    ("naive: mae 12.0 | test mae 9.10", "naive: mae 12.0 | test mae 0.00", "", False),
    ("yesterday's mae 12.0, test mae 9.10", "yesterday's mae 12.0, test mae 0.00", "", False),
    ("test r2 -3.10", "test r2 -3.00", "test r2 -3.20", True),
    ("test r2 0.40", "test r2 1.00", "", False),
    ("test accuracy 0.52", "test accuracy 0.50", "test accuracy 0.48", True),
    ("test accuracy 52.0%", "test accuracy 100.0%", "", False),
    ("train mae 0.31 val mae 0.40", "train mae 0.29 val mae 0.00", "train mae 0.30 val mae 1.10", False),
    ("val loss 0.31", "val loss 0.20", "val loss 0.50", False),  # with a penalty
])  # fmt: skip
def test_scores_for_right_answers(own: str, right: str, wrong: str, stopped: bool):
    assert (check(ran(own), lambda name: ran({"right": right, "wrong": wrong}[name])) is not None) == stopped


def test_what_was_not_answered_says_nothing():
    assert printed(ran("test mae 47.9"))
    assert not printed(ran("test mae 47.9", answered=3))
    assert not printed(ran("test mae 47.9", varied=False))


def test_which_scripts_are_suitable():
    facts = {"target": 1, "direct": 1.0, "fit": {"kind": "mse_loss"}}
    assert suitable(facts, ran("test mae 3.0"))
    assert not suitable({**facts, "direct": 0.0}, ran("test mae 3.0"))  # the loop adds something to the output
    assert not suitable({**facts, "fit": {"kind": "ctc_loss"}}, ran("test mae 3.0"))
    assert not suitable({**facts, "target": None}, ran("test mae 3.0"))
    assert not suitable(facts, ran("test loss 3.0"))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", ["numbers", "classes", "zeros"])
def test_answers_are_the_batch_s_own(seed: int, kind: str):
    torch.manual_seed(seed)
    x = torch.randn(60, 4)
    y = {"numbers": torch.randn(60, 1), "classes": torch.randint(3, (60,)), "zeros": torch.zeros(60, 1)}[kind]
    out = torch.randn(60, 3 if kind == "classes" else 1)
    one = SimpleNamespace(recent=deque([[x, y]]), backwards=0)
    seen = SimpleNamespace(recent=[one], steps=10)
    with torch.no_grad():
        found, other = (
            Answers(1, right=r, numbers=kind != "classes").answer(seen, ((x,), {}), out) for r in (True, False)
        )
        assert Answers(1, right=True).answer(seen, ((x + 1,), {}), out) is out  # not the batch's own input
        assert Answers(None, right=True).answer(seen, ((x,), {}), out) is out
    if kind == "classes":
        assert torch.equal(found.argmax(1), y)
        assert 0.1 < float((other.argmax(1) == y).float().mean()) < 0.7
    else:
        assert torch.equal(found, y)
        assert torch.equal(other.sort(0).values, y.sort(0).values)
        assert torch.equal(other, y) == (kind == "zeros")


def test_a_call_that_is_not_answered_ends_what_its_evaluation_printed():
    x, y, out = torch.randn(60, 4), torch.randn(60, 1), torch.randn(60, 1)
    one = SimpleNamespace(recent=deque([[x, y]]), backwards=0)
    answers, said = Answers(1, right=True, numbers=True), [0, -1]
    with torch.no_grad():
        answers.answer(SimpleNamespace(recent=[one], steps=10), ((x,), {}), out)
        answers.ended(one, said)
        assert answers.facts()[0]["output_span"] == [0, -1]
        answers.answer(SimpleNamespace(recent=[], steps=10), ((x + 1,), {}), out)  # a test without a loader
        assert answers.facts()[0]["output_span"][1] >= 0
        one.recent.append([x + 2, y])
        answers.passes.clear()
        answers.answer(SimpleNamespace(recent=[one], steps=10), ((x,), {}), out)
        answers.ended(one, [5, -1])
        assert not answers.facts()  # what is printed now may be the result of that test
    answers.answer(SimpleNamespace(recent=[one], steps=10), ((x,), {}), out)
    with torch.no_grad():
        answers.answer(SimpleNamespace(recent=[one], steps=11), ((x,), {}), out)
        answers.ended(one, [9, -1])
    assert answers.facts()
