"""Gives a script's own evaluation the right answers, then wrong ones, then the right ones again: does the score that it prints follow?

A model's outputs are replaced in passes over a loader without gradients. The first and the third score must be equal, else it is no
score of these outputs (a training accuracy that is printed beside).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from trainworthy.guard.checks.results import finding
from trainworthy.guard.measures.records import used
from trainworthy.guard.measures.scores import denominators
from trainworthy.guard.measures.scores.printed_scores import printed, printed_between, scores

SURE = 10.0  # logits of an answer
# Of right answers; iou: of classes that may be missing
NEEDED = {"acc": 0.9, "auc": 0.9, "ap": 0.8, "f1": 0.7, "dice": 0.7, "iou": 0.5}
ROWS = 40


class Oracle:
    """Answers of each evaluation, and where what was printed after it begins and ends."""

    def __init__(self) -> None:
        self.passes: dict[int, dict[str, Any]] = {}
        self.rounds: list[int] = []  # optimiser steps before each evaluation, of however many models and sets

    def answer(self, seen: Any, given: tuple, out: Any) -> Any:
        """Return what a model is made to answer in place of `out`."""
        one = seen.recent[-1] if seen.recent else None
        if one is None or one.backwards or torch.is_grad_enabled() or not seen.steps:
            self.unanswered()
            return out
        row = self.passes.setdefault(id(one), {"calls": 0, "answered": 0, "rows": 0, "output_span": [], "pass": one})
        row["calls"] += 1
        scored = out.get("logits") if isinstance(out, Mapping) else out
        answer = self.made(seen, row, used(one.recent, given), scored)
        if answer is None:
            self.unanswered()
            return out
        row["answered"] += 1
        row["rows"] += len(answer)
        row["most"] = max(row.get("most", 0), len(answer))
        row["samples"] = denominators.samples_of(one)
        if isinstance(out, Mapping):
            out["logits"] = answer  # type: ignore[index]
            return out
        return answer

    def unanswered(self) -> None:
        """The model was called on something else than an evaluation's known samples."""

    def made(self, seen: Any, row: dict[str, Any], batch: Any, out: Any) -> Tensor | None:
        """Return right or wrong answers to a batch, by turns; None if its targets are not known."""
        self.rounds += [] if seen.steps in self.rounds else [seen.steps]
        right = self.rounds.index(seen.steps) % 2 == 0
        row |= {
            "right": row.get("right", right),
            "round": row.get("round", seen.steps),
            "classes": row.get("classes", []),
        }
        target = wanted(batch, out, seen.places)
        if target is None:
            return None
        row["classes"] = sorted({*row["classes"], *target.flatten()[:4096].unique().tolist()})[:8]
        return saying(out, target, right=row["right"])

    def ended(self, one: Any, span: list[int]) -> None:
        """An evaluation has ended: what is printed from here to the next batch is its result."""
        if id(one) in self.passes:
            self.passes[id(one)]["output_span"] = span

    def done(self) -> bool:
        """Return whether three evaluations were answered, and what they print is known."""
        return len([r for r in self.facts() if r["output_span"] and r["output_span"][1] >= 0]) >= 3

    def facts(self) -> list[dict]:
        """Return one row for each evaluation, as plain values."""
        found = []
        for at in self.rounds:
            rows = [r for r in self.passes.values() if r["round"] == at]
            row = {k: sum(r[k] for r in rows) for k in ("calls", "answered", "rows")}
            if len(rows) == 1:
                row |= {k: rows[0].get(k, 0) for k in ("most", "samples")}
            ends = [r["output_span"] for r in rows if r["output_span"]]
            span = [ends[0][0], ends[-1][1]] if len(ends) == len(rows) else []
            found.append({**row, "right": rows[0]["right"], "classes": rows[0]["classes"], "output_span": span})
        return found


def wanted(batch: Any, out: Any, places: dict[int, int]) -> Tensor | None:
    """Return the entry of a batch that a model's outputs are scored with: classes (N, ...) of outputs (N, C, ...), or zeros and ones of the
    outputs' shape. None if several fit, unless the loss in training names one of them."""
    if not isinstance(out, Tensor) or not out.is_floating_point() or out.dim() < 1 or batch is None:
        return None
    leaves = [x.detach().to(out.device) if isinstance(x, Tensor) else None for x in tree_leaves(batch)]
    found = {i: x for i, x in enumerate(leaves) if x is not None and (classes(x, out) or binary(x, out))}
    known = max(places, key=lambda i: places[i]) if places else None
    if known is not None:
        return found.get(known)
    return next(iter(found.values())) if len(found) == 1 else None


def classes(x: Tensor, out: Tensor) -> bool:
    fits = x.dtype == torch.int64 and out.dim() > 1 and out.shape[1] > 1 and x.shape == out.shape[:1] + out.shape[2:]
    return bool(fits and x.numel() and int(x.min()) >= 0 and int(x.max()) < out.shape[1])


def binary(x: Tensor, out: Tensor) -> bool:
    same = x.numel() == out.numel() and x.dim() > 0 and out.dim() > 0 and len(x) == len(out)
    return bool(same and x.is_floating_point() and ((x == 0) | (x == 1)).all())


def saying(out: Tensor, target: Tensor, *, right: bool) -> Tensor:
    """Return outputs of the kind of `out` that say the target, or something else."""
    if classes(target, out):
        target = target if right else (target + 1) % out.shape[1]
        sure = torch.nn.functional.one_hot(target, out.shape[1]).movedim(-1, 1).to(out)
        total = out.float().exp().sum(1)
        if bool((out >= 0).all()) and bool(((out.float().sum(1) - 1).abs() < 1e-2).all()):
            return 0.98 * sure + 0.02 / out.shape[1]
        logarithms = bool(((total - 1).abs() < 1e-2).all())
        return (0.98 * sure + 0.02 / out.shape[1]).log() if logarithms else SURE * (2 * sure - 1)
    sure = (target if right else 1 - target).to(out).view(out.shape)
    return 0.0001 + 0.9998 * sure if bool(((out >= 0) & (out <= 1)).all()) else SURE * (2 * sure - 1)


def check(rows: list[dict], output: str) -> dict | None:
    """Return the verdict of `metric` on three evaluations; None where they do not tell."""
    rows = [r for r in rows if r["output_span"] and r["answered"] == r["calls"]]
    rows = [r for r in rows if r["rows"] >= ROWS and len(r["classes"]) > 1]
    if len(rows) < 3 or [r["right"] for r in rows[:3]] != [True, False, True]:
        return None
    first, wrong, again = (values(output, r["output_span"]) for r in rows[:3])
    measured = []
    for name, value in first.items():
        if name not in wrong or again.get(name) != value or wrong[name] == value:
            continue
        measured.append(f"{name} {value:.3g} for right answers and {wrong[name]:.3g} for wrong ones")
        if value < NEEDED[name]:
            cause = "the script computes its score wrongly (another axis, shifted labels, a wrong denominator, a threshold of another scale)"
            if wrong[name] > value:
                cause = "the score has the wrong sign, or labels mean the opposite in it"
            return finding("metric", f"the script prints {measured[-1]}", cause)
    if fault := denominators.check(rows[0] | {"right": rows[0]["rows"]}, output, rows[0]["output_span"]):
        return finding("metric", *fault)
    return finding("metric", f"the script prints {'; '.join(measured)}") if measured else None


def values(output: str, span: list[int]) -> dict[str, float]:
    """Return the scores that were printed after an evaluation."""
    found = {k: v for k, v in scores(printed_between(output, span)).items() if k in NEEDED}
    accuracy = printed(output, span)
    return found | ({"acc": accuracy} if accuracy is not None else {})
