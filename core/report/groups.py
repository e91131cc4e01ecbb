"""Statistics over several seeds: the mean with its interval, and the difference between two groups."""

import math
import statistics
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from trainworthy.core.base.console import last_line, table
from trainworthy.core.base.errors import UserError
from trainworthy.core.monitoring import cost
from trainworthy.core.report import intervals
from trainworthy.core.report.card import CHOSEN, page, plain
from trainworthy.core.report.folder import number, read_json, summary

NAME = "seeds.json"
QUARTERS = 4  # fewest seeds for an interquartile mean
LUCK = "a difference between single seeds is mostly luck: it has no interval"


def plan_of(folder: Path) -> dict[str, Any]:
    """Return the plan of a group of seeds. UserError: its file is cut off or another tool's."""
    plan = read_json(folder / NAME)
    kinds = {"recipe": str, "argv": list, "seeds": list, "at_once": int}
    if not all(isinstance(plan.get(k), kind) for k, kind in kinds.items()):
        raise UserError(f"{folder} is no group of seeds", got=f"no whole {NAME} with {', '.join(kinds)} in it",
                        needed="a folder that `trainworthy run RECIPE --seeds 5` made", next="ls -d runs/*/seeds-*")  # fmt: skip
    return plan


def collect(folder: Path) -> dict[str, Any]:
    """Summarise the seeds of a group that finished with a finite score; `values` is empty if there is none."""
    plan = plan_of(folder)
    found: dict[str, Any] = {k: plan[k] for k in ("recipe", "argv", "seeds", "at_once")}
    summaries = {}
    for seed in plan["seeds"]:
        ours = summary(read_json(folder / f"seed-{seed}" / "summary.json"))
        if ours and math.isfinite(number(ours["reported"][ours["metric"]])):  # a mean with NaN is NaN
            summaries[seed] = ours
    gates = {s: read_json(folder / f"seed-{s}" / "gates.json") for s in summaries}
    found["gates_off"] = [s for s in summaries if not gates[s].get("enabled", True)]
    found["gates"] = {str(s): rows for s in plan["seeds"] if (rows := _verdicts(folder / f"seed-{s}"))}
    found["values"], found["missing"] = {}, [s for s in plan["seeds"] if s not in summaries]
    found["ends"] = {str(s): last_words(folder / f"seed-{s}.log") or "not started" for s in found["missing"]}
    if not summaries:
        return found
    first = next(iter(summaries.values()))
    name = first["metric"]
    values = [s["reported"][name] for s in summaries.values()]
    common = ("metric", "question", "higher_is_better", "floor", "ceiling", "best_known", "steps")
    found |= {k: first[k] for k in common}
    found |= {"values": dict(zip(map(str, summaries), values, strict=True)), "mean": statistics.fmean(values),
              "min": min(values), "max": max(values), "weights": first["reported"]["weights"],
              "baselines": {k: statistics.fmean(s["baselines"][k][name] for s in summaries.values())
                            for k, v in first["baselines"].items() if name in v}}  # fmt: skip
    if spent := cost.together([cost.of_run(folder / f"seed-{s}") for s in summaries]):
        found["cost"] = spent
    if first.get("test"):
        found["test"] = statistics.fmean(s["test"]["metrics"][name] for s in summaries.values())
    if len(values) > 1:
        found |= {"sd": statistics.stdev(values), "interval_95": intervals.interval(values),
                  "noise": intervals.noise(values)}  # fmt: skip
    if len(values) >= QUARTERS:
        found |= {"iqm": float(intervals.iqm(np.array(values))), "iqm_interval_95": intervals.iqm_interval(values)}
    return found


def last_words(log: Path) -> str:
    """Return the newest line of a seed's log; of an error, its cause and not its next step. Empty without a log."""
    text = log.read_text(errors="replace") if log.exists() else ""
    for line in reversed(text.splitlines()[-12:]):
        if line.startswith(("crashed: ", "stopped: ", "stopped before training: ", "error: ")):
            return line.removeprefix("crashed: ")
    return last_line(text).strip()


def _verdicts(folder: Path) -> dict[str, str]:
    """Return {gate: verdict} of one seed's run, in the order of the run; empty if its gates were off or never ended. With several
    stages a gate is `stage id`."""
    written = read_json(folder / "gates.json")
    gates = written.get("gates", []) if written.get("enabled", True) else []
    many = len({v.get("stage") for v in gates}) > 1
    return {f"{v.get('stage')} {v.get('id')}" if many else str(v.get("id")): str(v.get("verdict")) for v in gates}


def gates_in_words(found: dict[str, Any]) -> str:
    """State how many gates passed at which seeds, and which ones failed or were waived; empty if no seed has verdicts."""
    alike: dict[str, list[str]] = {}
    for seed, gates in found["gates"].items():
        counts = Counter(gates.values())
        words = [f"{counts['pass']} of {len(gates)} gates passed, {counts['skip']} skipped"]
        others = [kind for kind in counts if kind not in ("pass", "skip")]
        words += [f"{kind}: {', '.join(g for g, v in gates.items() if v == kind)}" for kind in others]
        alike.setdefault("; ".join(words), []).append(seed)
    return " · ".join(f"{'seeds' if len(n) > 1 else 'seed'} {', '.join(n)}: {words}" for words, n in alike.items())


def rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """(label, number) of a group: each seed, then the summary."""
    cells = [(f"seed {s}", f"{v:.4f}") for s, v in found["values"].items()]
    cells.append(("mean", f"{found['mean']:.4f}"))
    if "test" in found:
        cells.append(("mean on the test split", f"{found['test']:.4f}"))
    if "sd" in found:
        low, high = found["interval_95"]
        cells += [("sample standard deviation", f"{found['sd']:.4f}"),
                  ("95% interval of the mean (Student's t)", f"{low:.4f} to {high:.4f}"),
                  ("lowest to highest", f"{found['min']:.4f} to {found['max']:.4f}")]  # fmt: skip
    if "iqm" in found:
        low, high = found["iqm_interval_95"]
        cells += [("interquartile mean", f"{found['iqm']:.4f}"),
                  ("its 95% interval (bootstrap over seeds)", f"{low:.4f} to {high:.4f}")]  # fmt: skip
    if found.get("cost"):
        cells.append(("cost, all seeds", cost.words(found["cost"])))
    return cells


def sentence(found: dict[str, Any]) -> str:
    """Explain the spread to readers who compare results."""
    n = len(found["values"])
    text = off(found)
    if found["missing"]:
        missing = ", ".join(map(str, found["missing"]))
        text += f"{len(found['missing'])} of {len(found['seeds'])} seeds did not finish, or have no finite score: {missing}. "
    if n < 2:
        return text + "One seed: differences between single seeds are not results."
    if found["sd"] == 0:
        return text + "Every seed gave the same number: too short a run, or too coarse a metric, to show the spread."
    text += f"Two single runs may differ by {found['noise']:.4f} by chance."
    return text + " A smaller difference between single seeds is noise."


def off(found: dict[str, Any]) -> str:
    """A sentence on seeds that ran without gates; empty if there are none."""
    seeds = found.get("gates_off")
    if not seeds:
        return ""
    return f"Gates were off at {len(seeds)} of {len(found['values'])} seeds: nothing about these was checked. "


def as_text(found: dict[str, Any]) -> str:
    head = f"result {found['question']}  ({found['weights']} weights, {len(found['values'])} seeds)"
    lines = [("", found["metric"]), *rows(found), *((k, f"{v:.4f}") for k, v in found["baselines"].items())]
    gates = f"\n  {checked}" if (checked := gates_in_words(found)) else ""
    return f"{head}\n{table(lines)}\n  {sentence(found)}{gates}"


def title(found: dict[str, Any]) -> str:
    """Return the recipe's name, of a file its stem."""
    recipe = found["recipe"]
    return Path(recipe).stem if recipe.endswith(".py") else recipe


def card(found: dict[str, Any]) -> str:
    gates = [f"Gates: {checked}.", ""] if (checked := plain(gates_in_words(found))) else []
    ends = [f"- seed {s}: {plain(words)}" for s, words in found["ends"].items()]
    if not found["values"]:
        head = f"# {plain(title(found))}: no score"
        none = f"None of {len(found['seeds'])} seeds has a score. How each ended:"
        return page([head, "", none, "", *ends, "", *gates])
    name = plain(found["metric"])
    lines = [
        f"# {plain(title(found))}: {plain(found['question'])}",
        "",
        f"**{name} {found['mean']:.4f}**, mean over {len(found['values'])} seeds; the {found['weights']} weights of each "
        f"({CHOSEN[found['weights']]}).",
        "",
        sentence(found),
        "",
        f"| | {name} |",
        "|---|---|",
        *(f"| {k} | {v} |" for k, v in rows(found)),
        *(f"| {plain(k)} | {v:.4f} |" for k, v in found["baselines"].items()),
        f"| chance | {found['floor']:.4f} |",
        "",
        f"Best known: {plain(found['best_known'] or 'not stated')}.",
        "",
        *gates,
        *(["Seeds without a score:", "", *ends, ""] if ends else []),
        "Each seed has its own card and report in seed-<k>/.",
    ]
    return page(lines)


# ------------------------------------------------------------------------------------------------------------------ compare
@dataclass
class Comparison:
    """Two groups of seeds, and the difference of their means (second minus first)."""

    a: dict[str, Any]
    b: dict[str, Any]
    difference: intervals.Difference

    def words(self) -> str:
        d = self.difference
        if not d.real:
            return "The interval includes 0: these seeds do not show a difference."
        better = (d.value > 0) == self.a["higher_is_better"]
        return f"The interval excludes 0: the second is {'better' if better else 'worse'}."


def compare(a: Path, b: Path) -> Comparison:
    """Return the difference of two groups of seeds with its 95% interval (Welch); raises for single seeds."""
    groups = []
    for folder in (Path(a), Path(b)):
        if not (folder / NAME).is_file():
            single = (folder / "args.json").is_file()
            raise UserError(f"{folder} is {'a single run' if single else 'no group of seeds'}",
                            got="one seed" if single else "no seeds.json in it", cause=LUCK if single else "",
                            needed="a folder that `trainworthy run RECIPE --seeds 5` made")  # fmt: skip
        groups.append(collect(folder))
        if len(groups[-1]["values"]) < 2:
            raise UserError(f"{folder} has too few finished seeds", got=len(groups[-1]["values"]), needed="2 or more",
                            cause=LUCK, next=f"trainworthy resume {folder}")  # fmt: skip
    one, two = groups
    if one["metric"] != two["metric"]:
        got = f"{one['metric']} and {two['metric']}"
        raise UserError("the two groups report different metrics", got=got, needed="the same")
    return Comparison(one, two, intervals.welch(list(one["values"].values()), list(two["values"].values())))
