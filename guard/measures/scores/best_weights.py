"""Reads which weights a script takes for its best: does a variable named `best...` follow the best or the worst of a printed score?

Variables of the script are read when it trains on after an evaluation; what it printed in between is read from its output.
"""

import inspect
import re
from typing import Any

from trainworthy.core.base.names import more_is_better
from trainworthy.guard.measures.records import own_frames, written
from trainworthy.guard.measures.scores.printed_scores import Series, series

BEST = re.compile(r"(?i)(?:^|_)best(?:_|$)|^best(?=[A-Z])")
OTHER = re.compile(r"(?i)epoch|step|iter|idx|index|state|path|time|params|weights")
MOST = 400  # evaluations
ROUNDS = 3  # evaluations with another value of the score than the first
CLOSE = 0.0051  # a score that was printed with two digits
WRONG = "the best weights are chosen in the wrong direction (mode='min' for a score, 'max' for a loss, or < for >)"


class Rounds:
    """Evaluations between two training steps: where in the output their numbers are, and the script's `best...` after them."""

    def __init__(self) -> None:
        self.rows: list[dict] = []
        self.open: dict | None = None

    def evaluation(self, step: int) -> None:
        """A model was called without gradients."""
        if self.open is None and len(self.rows) < MOST:
            self.open = {"step": step, "output_span": [written(), -1]}

    def training(self) -> None:
        """A model was called with gradients: an evaluation before it has ended."""
        if self.open is None:
            return
        row, self.open = self.open, None
        row["output_span"][1] = written()
        if row["output_span"][1] > row["output_span"][0]:
            self.rows.append(row | {"best": best_numbers(inspect.currentframe())})


def best_numbers(frame: Any) -> dict[str, float]:
    """Return the script's variables that are named as the best of something, and the same of its objects."""
    found: dict[str, float] = {}
    for own in own_frames(frame):
        for scope in (own.f_locals, own.f_globals):
            mine = [vars(v) for v in list(scope.values()) if owned(v, own.f_globals)]
            for names in (scope, *mine):
                for k, v in list(names.items()):
                    if isinstance(k, str) and BEST.search(k) and not OTHER.search(k) and (x := number(v)) is not None:
                        found.setdefault(k, x)
    return found


def owned(value: Any, names: dict) -> bool:
    """Return whether an object is of a class of the script."""
    return type(value).__module__ == names.get("__name__", "") and hasattr(value, "__dict__")


def number(value: Any) -> float | None:
    """Return a finite float, also of numpy or a tensor; None for whole numbers and all else."""
    if isinstance(value, (bool, int, str)) or getattr(value, "shape", ()) != () or not hasattr(value, "__float__"):
        return None
    if getattr(value, "requires_grad", False):
        value = value.detach()
    found = float(value)
    return found if abs(found) < float("inf") else None


def check(rows: list[dict], output: str) -> tuple[str, str]:
    """Return what is seen of a script's best weights, and its cause; the cause is empty if nothing is wrong."""
    measured, wrong = "", {}
    right = set()  # also of a score that did not change: an average that hardly moves within a short run
    for name, known, values, best in tracked(rows, output):
        low, high = (running(values, which) for which in (min, max))
        good, bad = (high, low) if known.sign > 0 else (low, high)
        fits, misfits = (all(abs(v - x) <= CLOSE for v, x in zip(best, way, strict=True)) for way in (good, bad))
        right |= {name} if fits else set()
        differ = sum(abs(a - b) > 4 * CLOSE for a, b in zip(good, bad, strict=True))
        if differ < ROUNDS or (known.sign > 0 and more_is_better(name) is False):
            continue
        if fits:
            measured = measured or f"{name} is the best of {len(values)} values of '{known.name}'"
        elif misfits:
            wrong.setdefault(
                name,
                f"{name} is {best[-1]:.3g}, the worst of {len(values)} values of '{known.name}' ({min(values):.3g} to {max(values):.3g})",
            )
    for name in sorted(wrong.keys() - right):
        return wrong[name], WRONG
    return measured, ""


def tracked(rows: list[dict], output: str) -> list[tuple[str, Series, list[float], list[float]]]:
    """Return each `best...` with each score that was printed once after every evaluation: the values of both."""
    text, found = output.encode(), {}
    for row in rows:
        printed = series(text[row["output_span"][0] : row["output_span"][1]].decode(errors="replace"))
        for key, one in printed.items():
            if (
                len(one.values) == 1
                and one.kind != "likelihood"
                and "train" not in one.name
                and one.values[0] == one.values[0]
            ):
                found.setdefault(key, (one, []))[1].append((one.values[0], row["best"]))
    pairs = []
    for one, seen in found.values():
        for name in {k for _, best in seen for k in best}:
            both = [(x, best[name]) for x, best in seen if name in best]
            if len(both) < len(seen) or len(both) < ROUNDS:
                continue
            values, best = (list(column) for column in zip(*both, strict=True))
            scale = 100 if max(map(abs, values)) > 1.5 >= max(map(abs, best)) and one.sign > 0 else 1
            pairs.append((name, one, [x / scale for x in values], best))
    return pairs


def running(values: list[float], which: Any) -> list[float]:
    """Return the least or greatest of the values so far."""
    return [which(values[: i + 1]) for i in range(len(values))]
