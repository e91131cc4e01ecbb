"""The denominator of a printed accuracy: do the right answers that were counted in an evaluation give it over another number of samples?"""

import contextlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from trainworthy.guard.measures.records import Pass
from trainworthy.guard.measures.scores.printed_scores import printed_between

DIGITS = 4  # of a share, below which another number may be equal to it by chance
DECIMALS = re.compile(r"(?<![\w.\-])\d{1,3}\.\d+(?![\w.])")
FULL = "every batch counts as a full one, and the last one is smaller: divide by the number of samples"
ALL = "it is divided by len(dataset), and the loader does not give all samples (drop_last, a sampler)"


def counted(one: Pass) -> dict[str, int]:
    """Return what was counted in an evaluation; nothing if some of its batches were not."""
    if not one.seen or not one.calls == one.got == len(one.answers):
        return {}
    most = max(len(t) for t, _ in one.answers)
    return {"right": one.right, "rows": one.seen, "calls": one.calls, "most": most, "samples": samples_of(one)}


def samples_of(one: Pass) -> int:
    """Return the samples of an evaluation's data set; 0 of a stream."""
    with contextlib.suppress(TypeError, AttributeError):
        return len(one.loader.dataset)  # type: ignore[arg-type]
    return 0


def explain(value: float, digits: int, row: Mapping[str, Any]) -> str:
    """Return the wrong denominator that explains a share of right answers that was printed with so many digits; "" if none does."""
    near, right = 0.51 * 10.0**-digits, row["right"]
    if digits < DIGITS or abs(value - right / row["rows"]) <= 2 * near:
        return ""
    of = {FULL: row["calls"] * row.get("most", 0), ALL: row.get("samples", 0)}
    return next((cause for cause, n in of.items() if row["rows"] < n and abs(value - right / n) <= near), "")


def check(row: Mapping[str, Any], output: str, span: list[int]) -> tuple[str, str] | None:
    """Return (what an evaluation printed, its wrong denominator). None if a number that it printed has the right one, or another cause."""
    if not row or not span:
        return None
    shares = [(float(x), len(x.partition(".")[2])) for x in DECIMALS.findall(printed_between(output, span))]
    shares += [(x / 100, digits + 2) for x, digits in shares]
    if any(abs(x - row["right"] / row["rows"]) <= 10.0**-digits for x, digits in shares if digits > 1):
        return None
    found = ((x, explain(x, digits, row)) for x, digits in shares)
    for x, cause in found:
        if cause:
            return f"the script prints {x:.5g}, with {row['right']} of {row['rows']} samples right", cause
    return None


def always(evaluations: Sequence[tuple[Mapping[str, Any], list[int]]], output: str) -> tuple[str, str] | None:
    """Return the same of the last evaluation, if all that were counted have this cause."""
    found = [check(row, output, span) for row, span in evaluations if row]
    return found[-1] if len({fault and fault[1] for fault in found}) == 1 else None
