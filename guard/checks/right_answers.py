"""Gives all evaluations of a script the right answers, to its end: does the script then print a perfect score?

`oracle` does this for the classes of the first evaluations. Here the last test counts, too, and numbers are answered as well as classes: an
error must be near zero. Where it is not, the evaluation compares the answers with something else: another unit or column, other rows, an
order that the loader has shuffled. A second run with the answers of other samples shows what the same score is then.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from trainworthy.guard.checks.oracle import ROWS, Oracle, saying, wanted
from trainworthy.guard.checks.results import ENDED
from trainworthy.guard.measures.losses.float_targets import BINARY
from trainworthy.guard.measures.records import written
from trainworthy.guard.measures.scores import denominators
from trainworthy.guard.measures.scores.printed_scores import Series, printed_between, series

if TYPE_CHECKING:
    from trainworthy.guard.rehearsals.rehearsal import Outcome

ANSWERABLE = (*BINARY, "mse_loss", "difference", "l1_loss", "smooth_l1_loss", "huber_loss")
KINDS = ("error", "fit", "accuracy", "ranking", "overlap")
NEEDED = {"fit": 0.7, "accuracy": 0.9, "ranking": 0.9, "overlap": 0.5}
SUSPECT = 0.3  # error of right answers, as a part of the trained model's
WRONG = 0.5  # the same, of that of other samples' answers
CAUSE = (
    "the evaluation compares the predictions with something else: another column's mean and scale (inverse_transform), another unit, other "
    "rows, or an order that its loader has shuffled"
)


class Answers(Oracle):
    """Answers every evaluation alike: with each sample's own target, or with those of other samples."""

    def __init__(self, place: int | None, *, right: bool, numbers: bool = False) -> None:
        super().__init__()
        self.place, self.right, self.numbers = place, right, numbers
        self.mixed = False  # since the last step, the model was also called on something that was not answered

    def made(self, seen: Any, row: dict[str, Any], batch: Any, out: Any) -> Tensor | None:
        answer = None if self.place is None else self._answer(batch, out, self.place)
        # Zeros in the place of unknown targets are no answers
        varied = answer is not None and bool((answer != answer[:1]).any())
        row["varied"] = row.get("varied", False) or varied
        return answer

    def _answer(self, batch: Any, out: Any, place: int) -> Tensor | None:
        target = None if self.numbers else wanted(batch, out, {place: 1})
        if target is not None:
            return saying(out, self._mine(target), right=True)
        leaves = tree_leaves(batch) if batch is not None else []
        y = leaves[place] if self.numbers and place < len(leaves) else None
        if not isinstance(y, Tensor) or not isinstance(out, Tensor) or not y.is_floating_point():
            return None
        fits = out.is_floating_point() and y.dim() and out.dim() and len(y) == len(out) and y.numel() == out.numel()
        return self._mine(y.detach()).to(out).view(out.shape).clone() if fits else None

    def _mine(self, target: Tensor) -> Tensor:
        if self.right or len(target) < 2:
            return target
        return target[
            torch.randperm(len(target), generator=torch.Generator().manual_seed(len(target))).to(target.device)
        ]

    def unanswered(self) -> None:
        """What is printed from here on may be the result of what was not answered."""
        for row in self.passes.values():
            if row["output_span"] and row["output_span"][1] < 0:
                row["output_span"][1] = written()
        self.mixed = not torch.is_grad_enabled()

    def ended(self, one: Any, span: list[int]) -> None:
        """An evaluation has ended: what is printed next is its result, unless there was another one that was not answered."""
        if not self.mixed:
            super().ended(one, span)

    def done(self) -> bool:
        """The script runs to its end."""
        return False

    def facts(self) -> list[dict]:
        """Return one row for each evaluation, as plain values."""
        return [{k: v for k, v in row.items() if k != "pass"} for row in self.passes.values() if row["output_span"]]


def numeric(facts: dict[str, Any]) -> bool:
    """Return whether the loss compares numbers, by the facts of a run."""
    return bool(facts.get("fit")) and facts["fit"]["kind"] not in BINARY


def suitable(facts: dict[str, Any], ended: "Outcome") -> bool:
    """Return whether the right answers are known, and a score is printed that should be perfect with them."""
    record, fit = ended.record, facts.get("fit") or {}
    if facts.get("target") is None or record.get("why") != ENDED or record.get("exit") or "progress" not in record:
        return False
    if fit and (fit["kind"] not in ANSWERABLE or facts.get("direct", 0.0) < 0.9):
        return False
    return any(one.kind in KINDS for one in series(ended.output).values())


def answered(one: "Outcome") -> list[dict]:
    """Return the evaluations all of whose calls were answered."""
    rows = one.record.get("answers", [])
    return [r for r in rows if r["answered"] == r["calls"] and r["rows"] >= ROWS and r["varied"]]


def printed(one: "Outcome") -> dict[str, Series]:
    """Return the scores that were printed after evaluations all of whose calls were answered."""
    text = "\n".join(printed_between(one.output, r["output_span"]) for r in answered(one))
    return {k: s for k, s in series(text).items() if s.kind in KINDS and "train" not in s.name}


def first(one: Series) -> float:
    """Return a score's first value: until then, nothing of the run depends on an evaluation."""
    return one.shares[0]


def check(ended: "Outcome", rehearse: "Callable[[str], Outcome]") -> tuple[str, str] | None:
    """Return a score that is not perfect for right answers, and its cause. `rehearse`: runs `right` or `wrong`."""
    own, answers = series(ended.output), rehearse("right")
    right = printed(answers)
    doubtful = {}
    for key, one in right.items():
        if key in own and (value := first(one)) == value and value != first(own[key]):
            known = abs(first(own[key]))
            if value > SUSPECT * known if one.kind == "error" else value < NEEDED[one.kind]:
                doubtful[key] = value
    if not doubtful:
        rows = ({**r, "right": r["rows"]} for r in answered(answers))
        return next((fault for r in rows if (fault := denominators.check(r, answers.output, r["output_span"]))), None)
    wrong = printed(rehearse("wrong"))
    for key, value in doubtful.items():
        one = right[key]
        if key not in wrong:
            continue
        other = first(wrong[key])
        if value > WRONG * other > 0 if one.kind == "error" else value - other < WRONG * (1 - other):
            return (
                f"with the right answers in place of the model's, the script prints {one.name} {value:.4g}; with those of other samples "
                f"{other:.4g}, with the model's own {first(own[key]):.4g}",
                CAUSE,
            )
    return None
