"""`pytest --record docs/verify.md`: what planted bugs and healthy variants did, at the seeds they were run at.

Outcomes are kept beside the page (`docs/verify.jsonl`: a line for each case, with date and commit of the run at each seed) and
written as they come: a session that is cut off, or runs some cases alone, adds what it saw.
"""

import json
import math
import statistics
import subprocess
import time
from functools import cached_property
from pathlib import Path

import pytest
from trainworthy.core.recipe.loading import versions

PAGE = Path(__file__).parents[2] / "docs" / "verify.md"
SCRIPTS = "plain scripts"
KINDS = {"test_caught": "plant", "test_quiet": "healthy"}
FILES = ("test_gates.py", "test_quiet.py", "test_check.py")


def pytest_addoption(parser) -> None:
    parser.addoption("--record", type=Path, help="add what this session sees of plants and healthy variants to a page")


def pytest_configure(config) -> None:
    if config.getoption("--record") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Record(config.getoption("--record")))


def pytest_collection_modifyitems(items: list) -> None:
    """What `make test` runs comes first, then seed by seed: `make verify` shows early whether the rest is worth waiting for, and
    where it is cut off, whole seeds have been run."""

    def turn(item) -> tuple[bool, int]:
        found = getattr(item, "callspec", None)
        return item.get_closest_marker("verify") is not None, found.params.get("seed", 0) if found else 0

    items.sort(key=turn)


@pytest.fixture
def noted(record_property):
    """Keep of a check which gate failed first and what they cost."""

    def keep(verdicts: list[dict]) -> None:
        failed = [v["id"] for v in verdicts if v["verdict"] == "fail"]
        record_property("first", failed[0] if failed else "none")
        record_property("seconds", round(sum(v["seconds"] for v in verdicts), 1))

    return keep


Case = tuple[str, str, str]  # recipe, "plant" or "healthy", name
# Seed -> {"ok", "run": date and commit, of a plant also "first": gate, "seconds": of its gates}.
Seeds = dict[str, dict]


class Record:
    """What every case did at its seeds, the newest run of each."""

    def __init__(self, page: Path):
        self.page, self.lines = page, page.with_suffix(".jsonl")
        self.seen = self.read()
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
        self.run = f"{time.strftime('%Y-%m-%d')} {commit}"

    def read(self) -> dict[Case, Seeds]:
        kept = [json.loads(line) for line in self.lines.read_text().splitlines()] if self.lines.exists() else []
        return {(k["recipe"], k["kind"], k["case"]): k["seeds"] for k in kept}

    @cached_property
    def suite(self) -> list[Case]:
        """All that the suite has now, by recipe, plants first."""
        from tests.core import test_check, test_gates, test_quiet  # only now: pytest rewrites what it collects itself

        found = [(p.recipe, "plant", p.id) for p in test_gates.PLANTS]
        found += [(h.recipe, "healthy", h.id) for h in test_quiet.VARIANTS]
        found += [("vision/classify", "healthy", "as-it-is")]
        found += [(SCRIPTS, "plant", n) for n in test_check.PLANTS]
        found += [(SCRIPTS, "healthy", n) for n in test_check.HEALTHY]
        return sorted(found, key=lambda case: (case[0], case[1] != "plant", case[2]))

    def pytest_runtest_logreport(self, report) -> None:
        file, _, rest = report.nodeid.partition("::")
        test, _, name = rest.rstrip("]").partition("[")
        kind = KINDS.get(test.removesuffix("_at_every_seed"))
        if report.when != "call" or kind is None or Path(file).name not in FILES:
            return
        name, _, seed = name.rpartition("-") if test.endswith("_at_every_seed") else (name, "", "0")
        script = file.endswith(FILES[-1])
        [case] = [c for c in self.suite if c[1:] == (kind, name) and (c[0] == SCRIPTS) == script]
        self.seen = self.read()  # another session may write to it, too
        seeds = self.seen.setdefault(case, {})
        seeds[seed] = {"ok": report.outcome == "passed", "run": self.run, **dict(report.user_properties)}
        rows = [{"recipe": r, "kind": k, "case": c, "seeds": dict(sorted(s.items()))} for (r, k, c), s in self.cases()]
        self.lines.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def pytest_sessionfinish(self) -> None:
        self.page.write_text("\n".join(self.markdown()) + "\n")

    def cases(self) -> list[tuple[Case, Seeds]]:
        return [(case, self.seen[case]) for case in self.suite if case in self.seen]

    def markdown(self) -> list[str]:
        """Return the lines of the page; misses and false alarms first."""
        plants, healthy = ([c for c in self.cases() if c[0][1] == kind] for kind in ("plant", "healthy"))
        what = {"plant": "not caught", "healthy": "false alarm"}
        missed = [f"- {what[kind]}: {recipe}, `{name}`, seed {seed} ({of['run']})" for (recipe, kind, name), seeds in self.cases()
                  for seed, of in seeds.items() if not of["ok"]]  # fmt: skip
        right, every = single(healthy)
        runs = sorted(of["run"] for _, seeds in self.cases() for of in seeds.values())
        lines = [
            "# Results of `make verify`", "",
            "What the gates did with each planted bug and each healthy variant, in its newest run at each seed. A planted bug counts as",
            "caught if the gate that should stop it fails and names the right cause. A healthy variant passes if no gate fails.", "",
            f"- Planted bugs caught at every seed they were run at: {wilson(*whole(plants))} (95% Wilson intervals).",
            f"- Planted bugs caught, over single runs: {wilson(*single(plants))}.",
            f"- False alarms: {wilson(every - right, every)} over single runs of {len(healthy)} healthy variants.", "",
            "The test suite writes this page (`tests/helpers/record.py`). Date and commit of each run are in",
            f"[verify.jsonl](verify.jsonl), {runs[0]} to {runs[-1]} (`by hand`: observed on that day, before this",
            "file recorded single runs). Versions in the last session:",
            ", ".join(f"{k} {v}" for k, v in versions().items()) + ".", "",
            "## Misses and false alarms", "", *(missed or ["None."]), "",
            "## Every recipe", "",
            "| recipe | planted bugs | at seeds | runs that were stopped | healthy variants | at seeds | runs without alarm "
            "| time of the gates on a planted bug, median |",
            "|---|---|---|---|---|---|---|---|",
        ]  # fmt: skip
        for recipe in dict.fromkeys(case[0] for case in self.suite):
            cells = []
            for kind in ("plant", "healthy"):
                own = [c for c in self.cases() if c[0][:2] == (recipe, kind)]
                known = sum(case[:2] == (recipe, kind) for case in self.suite)
                cells += [f"{len(own)} of {known}", covered(own), "{} of {}".format(*single(own)) if own else ""]
            spent = [of["seconds"] for case, s in plants if case[0] == recipe for of in s.values() if "seconds" in of]
            lines.append(f"| {recipe} | {' | '.join(cells)} | {f'{statistics.median(spent):.1f} s' if spent else ''} |")
        lines += ["", "## Every planted bug", "", "| recipe | planted bug | first gate that failed | caught at seeds |"]
        lines += ["|---|---|---|---|"]
        for (recipe, _, name), seeds in plants:
            first = ", ".join(sorted({of["first"] for of in seeds.values() if "first" in of}))
            lines.append(f"| {recipe} | `{name}` | {first} | {good(seeds)} |")
        lines += ["", "## Every healthy variant", "", "| recipe | variant | no alarm at seeds |", "|---|---|---|"]
        return lines + [f"| {recipe} | `{name}` | {good(seeds)} |" for (recipe, _, name), seeds in healthy]


def single(cases: list[tuple[Case, Seeds]]) -> tuple[int, int]:
    """(runs that did what they should, runs)."""
    outcomes = [of["ok"] for _, seeds in cases for of in seeds.values()]
    return sum(outcomes), len(outcomes)


def whole(cases: list[tuple[Case, Seeds]]) -> tuple[int, int]:
    """(cases that did what they should at every seed they were run at, cases)."""
    return sum(all(of["ok"] for of in seeds.values()) for _, seeds in cases), len(cases)


def good(seeds: Seeds) -> str:
    return ", ".join(seed for seed, of in seeds.items() if of["ok"])


def covered(cases: list[tuple[Case, Seeds]]) -> str:
    """The seeds that all of the cases were run at, and those of some."""
    if not cases:
        return ""
    asked = [set(seeds) for _, seeds in cases]
    every, some = set.intersection(*asked), set.union(*asked)
    return ", ".join(sorted(every)) + (f" (some: {', '.join(sorted(some - every))})" if some - every else "")


def wilson(hits: int, n: int) -> str:
    """`hits of n: share [low, high]`, the 95% interval of Wilson 1927."""
    if not n:
        return "none run"
    z, p = 1.96, hits / n
    middle, half = p + z * z / 2 / n, z * math.sqrt(p * (1 - p) / n + z * z / 4 / n / n)
    low, high = (max(0.0, (middle + s * half) / (1 + z * z / n)) for s in (-1, 1))
    return f"{hits} of {n}: {p:.3f} [{low:.3f}, {min(high, 1):.3f}]"


if __name__ == "__main__":
    PAGE.write_text("\n".join(Record(PAGE).markdown()) + "\n")
