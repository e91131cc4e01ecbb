"""Right and wrong answers in a script's own evaluation, and a training after the first one."""

from collections import deque
from types import SimpleNamespace

import pytest
import torch
from trainworthy.guard.checks import oracle

from tests.guard.guarding import SCRIPTS, guard

SCRIPT = """
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x, y = load_digits(return_X_y=True)
x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
order = torch.randperm(len(x))
x, y = x[order], y[order]
loader = DataLoader(TensorDataset(x[:1200], y[:1200]), 32, shuffle=True)
test = DataLoader(TensorDataset(x[1200:], y[1200:]), 50)


def train(model, epochs, teacher=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for epoch in range(epochs):
        model.train()
        hits = 0
        for a, b in loader:
            optimizer.zero_grad()
            out = model(a)
            hits += int((out.argmax(1) == b).sum())
            if teacher is None:
                loss = F.cross_entropy(out, b)
            else:
                with torch.no_grad():
                    soft = teacher(a).softmax(1)
                loss = F.kl_div(out.log_softmax(1), soft, reduction="batchmean")
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            right = sum(int((model(a).argmax(1) == b).sum()) for a, b in test)
        print(f"epoch {epoch} train acc {hits / 1200:.4f} accuracy {right / len(test.dataset):.4f}")


teacher = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
train(teacher, 6)
teacher.eval()
student = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
train(student, 6, teacher)
"""
BUGS = {
    "metric": ("right / len(test.dataset)", "right / len(loader.dataset)", "computes its score wrongly"),
    "later": ("out.log_softmax(1), soft", "out.log_softmax(0), soft", "dim=0"),
}


@pytest.mark.parametrize("kind", ["logits", "probabilities", "logarithms", "pixels", "binary"])
def test_answers_are_of_the_kind_of_the_outputs(kind: str):
    torch.manual_seed(0)
    out = (
        torch.randn(64, 1) if kind == "binary" else torch.randn(64, 3, 5, 5) if kind == "pixels" else torch.randn(64, 4)
    )
    out = (
        {"probabilities": out.softmax(1), "logarithms": out.log_softmax(1)}.get(kind, out)
        if out.dim() == 2 and kind != "binary"
        else out
    )
    y = torch.randint(0, 2, (64,)).float() if kind == "binary" else torch.randint(0, out.shape[1], (64, *out.shape[2:]))
    one, x, passes = oracle.Oracle(), torch.randn(64, 8), []
    for step, right in enumerate((True, False, True), 1):
        passes.append(SimpleNamespace(backwards=0, recent=deque([[x, y]])))
        seen = SimpleNamespace(recent=passes, steps=step, places={})
        with torch.no_grad():
            said = one.answer(seen, (x,), out)
        assert said.shape == out.shape
        hits = ((said > 0).flatten() == y) if kind == "binary" else said.argmax(1) == y
        assert bool(hits.all()) if right else not bool(hits.any())
        if kind == "probabilities":
            assert torch.allclose(said.sum(1), torch.ones(64))
        if kind == "logarithms":
            assert float(said.logsumexp(1).abs().max()) < 1e-5
    assert [r["right"] for r in one.facts()] == [True, False, True]


@pytest.mark.parametrize(
    ("scores", "fault"),
    [
        ((1.0, 0.0, 1.0), ""),
        ((0.125, 0.0, 0.125), "computes"),
        ((0.0, 1.0, 0.0), "sign"),
        ((0.3, 0.4, 0.5), None),
        ((0.3, 0.3, 0.3), None),
    ],
)
def test_scores_of_right_and_wrong_answers(scores: tuple, fault: str | None):
    """The last two are training accuracies: they do not follow the answers."""
    output, rows = "", []
    for i, score in enumerate(scores):
        begin = len(output)
        output += f"epoch {i} acc {score:.4f}\n"
        rows.append(
            {
                "right": i != 1,
                "calls": 4,
                "answered": 4,
                "rows": 200,
                "classes": [0, 1],
                "output_span": [begin, len(output)],
            }
        )
    found = oracle.check(rows, output)
    assert (found is None) == (fault is None)
    if found is not None:
        assert found["cause"].count(fault) if fault else found["ok"]


@pytest.mark.verify
@pytest.mark.parametrize("name", ["", *BUGS])
def test_a_wrong_count_and_a_later_training_are_stopped(name: str, tmp_path):
    old, new, cause = BUGS.get(name, ("", "", ""))
    verdicts, output, _ = guard(
        SCRIPT.replace(old, new) if old else SCRIPT, tmp_path, **{"--seconds": "1", "--only": "metric,ending,later"}
    )
    assert {k for k, v in verdicts.items() if v.verdict == "fail"} == ({name} if name else set()), output
    assert cause in output
    if not name:
        assert verdicts["metric"].verdict == verdicts["later"].verdict == "pass", output


def test_the_last_batch_of_a_loader_that_fetches_ahead_is_answered(tmp_path):
    """Trainer's loaders end before their last batch is used: with an accumulation of two its outputs were those of the model (198 of
    240 right), and a healthy script failed."""
    source = (SCRIPTS / "ninth" / "hf_modules.py").read_text()
    source = source.replace("    warmup_steps=40,\n", "    warmup_steps=20,\n    gradient_accumulation_steps=2,\n")
    verdicts, output, _ = guard(source, tmp_path, **{"--only": "metric"})
    assert verdicts["metric"].verdict == "pass", output
    assert "acc 1 for right answers and 0 for wrong ones" in output
