"""Results of gates and monitors."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["pass", "fail", "skip", "waived", "advice"]

Fault = tuple[str, str]
"""What was measured, and its cause."""


@dataclass
class Finding:
    """Result of a gate's measurement."""

    ok: bool
    measured: str
    needed: str
    remedy: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)
    """Plain values for gates.json."""
    cause: str = ""
    """The cause that an experiment supports, with its evidence; it comes first among the likely causes."""
    batch: dict | None = None
    """The batch at fault, stored with the repro."""


class Skip(Exception):
    """Raised by a gate that does not apply, with the reason."""


@dataclass
class Verdict:
    """One row of gates.json. A skip is never a pass."""

    id: str
    rows: str
    title: str
    verdict: Kind
    measured: str
    needed: str
    remedy: str
    seconds: float
    reason: str = ""
    remembered: str = ""
    """When an identical recipe passed, if the gate did not run now."""
    stage: str = ""
    """Name of the checked stage."""
    reads: list[str] = field(default_factory=list)
    """Parts of a recipe that can change the verdict."""
    evidence: dict[str, Any] = field(default_factory=dict)
    cause: str = ""
    """`Finding.cause`: measured, not taken from a list."""

    @property
    def blocks(self) -> bool:
        return self.verdict == "fail"


SYMPTOMS = ("overfit", "baseline", "tiny-data")
"""Gates that tell that a training fails, and by themselves not why."""


def leading(failed: list[Verdict]) -> Verdict:
    """Return the failed gate to look at first: the first whose cause was measured, or else the first that is no symptom."""
    explained = [v for v in failed if is_explained(v.cause, v.evidence)]
    return (explained or [v for v in failed if v.id not in SYMPTOMS] or failed)[0]


def is_explained(cause: str, evidence: Mapping[str, Any]) -> bool:
    """Return whether the cause of a failed gate was measured, by itself or by another gate."""
    return bool(cause) or "explained_by" in evidence


def closing(first: Verdict, failed: int, of: int, kind: str = "gates") -> str:
    """Return two lines: how many of `kind` failed, which is to be looked at first, and its cause."""
    row = f" ({first.rows})" if first.rows else ""
    explained = f", explained by {first.evidence['explained_by']}" if "explained_by" in first.evidence else ""
    label = "raised at:   " if "traceback" in first.evidence else "likely cause:"
    return (
        f"{failed} of {of} {kind} failed{', see first' if failed > 1 else ''}: {first.id}{row}{explained}\n"
        f"  {label} {(first.remedy or 'not known').splitlines()[0]}"
    )
