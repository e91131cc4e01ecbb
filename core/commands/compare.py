"""usage: trainworthy compare RUNS_A RUNS_B [--json]

Tests whether the second group is better than the first by more than chance.

  trainworthy compare runs/vision-classify/seeds-A runs/mine/seeds-B    two groups that `run --seeds 5` made

Prints both means, the difference (second minus first) with its 95% interval (Welch), and what each group cost. Single runs are
refused: a difference between single seeds is mostly luck. `--json` prints the same as JSON. Exit codes: 0, or 2 if the two cannot be
compared."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainworthy.core.base.console import table
from trainworthy.core.base.errors import UserError
from trainworthy.core.commands import prints_json
from trainworthy.core.monitoring import cost
from trainworthy.core.report.groups import compare, off


@prints_json
def main(argv: list[str], output: dict[str, Any]) -> None:
    if len(argv) != 3:
        raise UserError("compare needs two groups of seeds", got=" ".join(argv[1:]) or "nothing",
                        needed="trainworthy compare RUNS_A RUNS_B", next="ls -d runs/*/seeds-*")  # fmt: skip
    a, b = (Path(word) for word in argv[1:])
    found = compare(a, b)
    if a.resolve() == b.resolve():
        raise UserError(
            "compare needs two different groups of seeds", got=f"{argv[1]} twice", next="ls -d runs/*/seeds-*"
        )
    d = found.difference
    output |= {"a": found.a, "b": found.b, "difference": {**asdict(d), "real": d.real}, "words": found.words()}
    both = list(zip(argv[1:], (found.a, found.b), strict=True))
    rows = [(name, f"{len(g['values'])} seeds", f"{g['mean']:.4f}", f"sd {g['sd']:.4f}") for name, g in both]
    print(table([("", "", found.a["metric"], ""), *rows]))
    for name, g in both:
        if spent := g.get("cost"):
            print(f"  {name}: cost of {len(g['values'])} seeds {cost.words(spent)}")
        if note := off(g):
            print(f"  {name}: {note.strip()}")
    print(f"  difference {d.value:+.4f}, 95% interval {d.low:+.4f} to {d.high:+.4f} (Welch)\n  {found.words()}")
