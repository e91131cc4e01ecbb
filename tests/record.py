"""`pytest --record docs/verify.md`: what the suite proved, written by the suite, with date and versions."""

import math
import statistics
import subprocess
import time
from collections import defaultdict
from pathlib import Path

import pytest

from core.recipe import versions


def pytest_addoption(parser) -> None:
    parser.addoption("--record", type=Path, help="write what this session proved to a Markdown file")


def pytest_collection_modifyitems(items: list) -> None:
    """What `make test` runs comes first, then seed by seed: `make verify` shows early whether the rest is worth waiting for, and
    where it is cut off, whole seeds have been run."""

    def turn(item) -> tuple[bool, int]:
        found = getattr(item, "callspec", None)
        return item.get_closest_marker("verify") is not None, found.params.get("seed", 0) if found else 0

    items.sort(key=turn)


def wilson(hits: int, n: int) -> str:
    """`hits of n: share [low, high]`, the 95% interval of Wilson 1927."""
    if not n:
        return "none run"
    z, p = 1.96, hits / n
    middle, half = p + z * z / 2 / n, z * math.sqrt(p * (1 - p) / n + z * z / 4 / n / n)
    low, high = (max(0.0, (middle + s * half) / (1 + z * z / n)) for s in (-1, 1))
    return f"{hits} of {n}: {p:.3f} [{low:.3f}, {min(high, 1):.3f}]"


def pytest_terminal_summary(terminalreporter, config) -> None:
    path = config.getoption("--record")
    if path is None:
        return
    stats = terminalreporter.stats
    caught: dict[str, list] = defaultdict(list)
    quiet: dict[str, list] = defaultdict(list)
    for outcome in ("passed", "failed", "xfailed", "xpassed"):
        for report in stats.get(outcome, []):
            test, _, case = report.nodeid.rpartition("::")[2].rstrip("]").partition("[")
            name = case.rpartition("-")[0] if test.endswith("at_every_seed") else case
            kind = {"test_caught": caught, "test_quiet": quiet}.get(test.removesuffix("_at_every_seed"))
            if kind is not None:
                kind[name].append((outcome == "passed", dict(report.user_properties)))
    path.write_text("\n".join(page(stats, caught, quiet, time.time() - terminalreporter._session_start.time)) + "\n")


def page(stats: dict, caught: dict, quiet: dict, seconds: float) -> list[str]:
    """The lines of the file; misses and false alarms first."""
    hits, plants = sum(ok for rows in caught.values() for ok, _ in rows), sum(map(len, caught.values()))
    whole = sum(all(ok for ok, _ in rows) for rows in caught.values())
    alarms, healthy = sum(not ok for rows in quiet.values() for ok, _ in rows), sum(map(len, quiet.values()))
    costs = [p["seconds"] for rows in caught.values() for _, p in rows if "seconds" in p]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    missed = [
        f"- {what}: `{name}` at {sum(not ok for ok, _ in rows)} of {len(rows)} seeds"
        for what, kind in (("not caught", caught), ("false alarm", quiet))
        for name, rows in kind.items()
        if not all(ok for ok, _ in rows)
    ]
    failed = [f"- failed: `{r.nodeid}`" for r in [*stats.get("failed", []), *stats.get("error", [])]]
    counts = ", ".join(
        f"{len(stats[k])} {k}" for k in ("passed", "failed", "error", "xfailed", "skipped") if stats.get(k)
    )
    lines = [
        "# What `make verify` proved", "",
        f"Written by the suite on {time.strftime('%Y-%m-%d %H:%M')}, commit {commit}, {seconds / 60:.0f} minutes. "
        + ", ".join(f"{k} {v}" for k, v in versions().items()) + ".", "",
        f"- Tests: {counts}.",
        f"- Planted bugs stopped by the right gate with the right words: {wilson(whole, len(caught))} at every seed that was run, "
        f"{wilson(hits, plants)} over single runs (95% Wilson intervals).",
        f"- False alarms on healthy runs: {wilson(alarms, healthy)}, over {len(quiet)} healthy variants.",
        f"- Gates of one bugged run up to the one that stops it: median {statistics.median(costs):.1f} s." if costs else "", "",
        "## Misses first", "", *(missed + failed or ["None."]), "",
        "## Every plant", "", "| plant | first gate that failed | caught, seeds | seconds of its gates |", "|---|---|---|---|",
    ]  # fmt: skip
    for name, rows in sorted(caught.items()):
        first = ", ".join(sorted({p["first"] for _, p in rows if "first" in p}))
        spent = [p["seconds"] for _, p in rows if "seconds" in p]
        cost = f"{statistics.median(spent):.1f}" if spent else ""
        lines.append(f"| `{name}` | {first} | {sum(ok for ok, _ in rows)} of {len(rows)} | {cost} |")
    lines += ["", "## Every healthy variant", "", "| variant | quiet, seeds |", "|---|---|"]
    lines += [f"| `{k}` | {sum(ok for ok, _ in v)} of {len(v)} |" for k, v in sorted(quiet.items())]
    return lines


@pytest.fixture
def noted(record_property):
    """Keep of a check which gate failed first and what they cost."""

    def keep(verdicts: list[dict]) -> None:
        failed = [v["id"] for v in verdicts if v["verdict"] == "fail"]
        record_property("first", failed[0] if failed else "none")
        record_property("seconds", sum(v["seconds"] for v in verdicts))

    return keep
