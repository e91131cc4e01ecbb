"""`trainworthy compare RUNS_A RUNS_B`: whether the second group of runs is better than the first by more than the
spread of seeds."""

from pathlib import Path

from trainworthy.core.base.console import table
from trainworthy.core.base.errors import UserError
from trainworthy.core.report.groups import compare, off


def main(argv: list[str]) -> None:
    """Print both means and the difference with its interval."""
    if len(argv) != 3:
        raise UserError("compare needs two groups of seeds", got=" ".join(argv[1:]) or "nothing",
                        needed="trainworthy compare RUNS_A RUNS_B", next="ls -d runs/*/seeds-*")  # fmt: skip
    found = compare(Path(argv[1]), Path(argv[2]))
    d = found.difference
    each = [
        (name, f"{len(g['values'])} seeds", f"{g['mean']:.4f}", f"sd {g['sd']:.4f}")
        for name, g in zip(argv[1:], (found.a, found.b), strict=True)
    ]
    print(table([("", "", found.a["metric"], ""), *each]))
    for name, g in zip(argv[1:], (found.a, found.b), strict=True):
        if note := off(g):
            print(f"  {name}: {note.strip()}")
    print(f"  difference {d.value:+.4f}, 95% interval {d.low:+.4f} to {d.high:+.4f} (Welch)\n  {found.words()}")
