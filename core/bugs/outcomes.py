"""Classifies the runs and checks of a case: how they ended, and whether a change does harm."""

import math
import statistics
from dataclasses import dataclass
from typing import Any

from trainworthy.core.base.errors import DONE, GATE_FAILED
from trainworthy.core.bugs import mutation
from trainworthy.core.bugs.suite import Case
from trainworthy.core.report.intervals import student

Row = dict[str, Any]
SHARE = 0.02  # of the range from chance to the best score: a smaller change of the metric is no harm
NUMBER = 1e-5  # relative: two evaluations of the same weights that differ by more report another number
FLATTERED = ("evaluate", "data", mutation.HELPER)  # parts in which a score that is too good is a fault


@dataclass
class Checked:
    """How a check ended."""

    code: int
    verdicts: list[Row]
    output: str

    @property
    def failed(self) -> list[Row]:
        return [v for v in self.verdicts if v["verdict"] == "fail"]

    @property
    def first(self) -> str:
        return self.failed[0]["id"] if self.failed else ""

    @property
    def note(self) -> str:
        """What the first failed gate measured, or the last line of a check that ended in another way."""
        return self.failed[0]["measured"] if self.failed else "" if self.code == DONE else last(self.output)


def first_gates(case: Case) -> list[str]:
    """Return the gates that run first on a planted bug: core's up to the one that must stop it, since what comes later cannot
    change which gate fails first; of a gate of the domain, that one and those that may fail before it."""
    from trainworthy.core.gates import order

    ids = [g.id for g in order.ORDER]
    return ids[: ids.index(case.gate) + 1] if case.gate in ids else [*case.before, case.gate]


def outcome(kind: str, code: int) -> str:
    """Return what an exit code means for a planted bug or a healthy variant."""
    names = {"planted": {DONE: "missed", GATE_FAILED: "caught"}, "healthy": {DONE: "quiet", GATE_FAILED: "alarm"}}
    return names[kind].get(code, "crashed")


def named(words: tuple[str, ...], verdict: Row) -> bool:
    """Return whether a gate's message holds every word that was fixed before the gate ran on the bug (case does not matter)."""
    message = " ".join((verdict["measured"], verdict["needed"], verdict["remedy"])).lower()
    return all(w.lower() in message for w in words)


def classify(ran: list[Row], reference: Row, part: str) -> tuple[str, str]:
    """Return what short runs say of a mutant: crashed, equal, harmless or harmful, and why."""
    first, base, name = ran[0], reference["first"], reference["metric"]
    if crash := next((r["crashed"] for r in ran if r["crashed"]), ""):
        return "crashed", crash
    if stop := next((r["stopped"] for r in ran if r["stopped"]), ""):
        return "harmful", f"the run stops itself: {stop}"
    if (first["losses"], first["metrics"]) == (base["losses"], base["metrics"]):
        return "equal", "same losses and metrics, to the last bit"
    if first["weights"] == base["weights"] and first["losses"] == base["losses"]:
        pairs = {k: (base["metrics"].get(k, math.nan), first["metrics"].get(k, math.nan))
                 for k in {**first["metrics"], **base["metrics"]}}  # fmt: skip
        other = [k for k, pair in pairs.items() if not math.isclose(*pair, rel_tol=NUMBER, abs_tol=1e-8)]
        if other:
            numbers = ", ".join("{} {:.4g} -> {:.4g}".format(k, *pairs[k]) for k in other[:2])
            return "harmful", f"the same weights, but another number is reported: {numbers}"
        return "equal", "same losses and weights; the metrics differ by rounding"
    values = [r["metrics"].get(name, math.nan) for r in ran]
    numbers = f"{name} {', '.join(f'{v:.4g}' for v in values)}"
    if not all(map(math.isfinite, values)):
        return "harmful", numbers
    low, high = healthy_range(reference)
    healthy = f"healthy runs: {low:.4g} to {high:.4g}"
    worse = [v < low if reference["higher"] else v > high for v in values]
    best = [v > high if reference["higher"] else v < low for v in values]
    if all(best) and part in FLATTERED:
        return "harmful", f"{numbers}: too good; {healthy}"
    return "harmful" if all(worse) else "harmless", f"{numbers}; {healthy}"


def healthy_range(reference: Row) -> tuple[float, float]:
    """Return the range in which 95% of single healthy runs lie, no narrower than `SHARE` of the metric's range on each side."""
    values = reference["values"]
    half = student(len(values) - 1) * statistics.stdev(values) * math.sqrt(1 + 1 / len(values))
    span = abs(reference["ceiling"] - reference["floor"])
    half = max(half, SHARE * span if math.isfinite(span) else 0.0)
    return statistics.fmean(values) - half, statistics.fmean(values) + half


def harm_rule(reference: Row) -> str:
    """Return the rule in words, with its numbers."""
    low, high = healthy_range(reference)
    return f"{'below' if reference['higher'] else 'above'} {low if reference['higher'] else high:.4g} at both seeds"


def last(output: str) -> str:
    """Return the line of an output that says how it ended."""
    lines = [text.strip() for text in output.splitlines() if text.strip()]
    marked = [t for t in lines[-15:] if t.startswith(("error: ", "crashed: ", "stopped")) or "Error: " in t]
    return (marked or lines or [""])[-1][:300]


def summary_line(row: Row) -> str:
    where = f"{row['recipe']} {row['case']}" + (f" seed {row['seed']}" if row["kind"] != "mutants" else "")
    by = f" by {row['first']}" if row["first"] else ""
    named_ = "" if row["kind"] != "planted" or row["outcome"] != "caught" or row["named"] else ", cause not named first"
    return f"{row['outcome']:<9} {where}{by}{named_}  [{row['seconds']:.0f} s]"
