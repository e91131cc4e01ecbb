"""What gates and monitors return."""

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass
class Finding:
    """What a gate saw."""

    ok: bool
    measured: str
    needed: str
    remedy: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)
    """Plain values for gates.json."""
    cause: str = ""
    """The cause that an experiment speaks for, with its evidence: comes first among the likely ones."""
    batch: dict | None = None
    """The batch at fault, kept with the repro."""


class Skip(Exception):
    """This gate does not apply, for the reason given."""


@dataclass
class Verdict:
    """One line of gates.json. A skip is never a pass."""

    id: str
    rows: str
    title: str
    verdict: Literal["pass", "fail", "skip", "waived", "advice"]
    measured: str
    needed: str
    remedy: str
    seconds: float
    reason: str = ""
    remembered: str = ""
    """When an identical recipe passed, if it was not proved again now."""
    stage: str = ""
    """The stage it was proved of."""
    reads: list[str] = field(default_factory=list)
    """Parts of a recipe whose change it may see."""
    evidence: dict[str, Any] = field(default_factory=dict)

    @property
    def blocks(self) -> bool:
        return self.verdict == "fail"
