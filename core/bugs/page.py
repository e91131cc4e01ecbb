"""Writes the report of a campaign, bugs.html and bugs.json: which bugs were caught and explained, false alarms, and the outcomes of
mutants."""

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from trainworthy.core.bugs.outcomes import Row
from trainworthy.core.report.html import card, esc, note, page, section, table, tag
from trainworthy.core.report.intervals import wilson

RULES = {
    "caught": "A planted bug is caught if a gate fails.",
    "named": "Its cause is named first if the first gate that fails is the one that should, and its message (measured, needed, "
    "likely causes) holds every word that was fixed before the gate ran on the bug.",
    "alarm": "A false alarm is a healthy variant that a gate fails. An interval is Wilson's, at 95%.",
    "order": "Core's gates up to the one that should fail run first, since later ones cannot change which is first; of a gate of the "
    "domain, that gate and those that may fail before it. If they pass, every gate runs.",
}
MUTANT_RULES = {
    "crashed": "The short run raises an exception or does not end, or the check of a harmful mutant ends with one.",
    "equal": "At seed 0 every loss and every metric of the short run equals the recipe's.",
    "harmful": "The metric is worse than the healthy range at seeds 0 and 1 (in data, evaluation and helpers also: better), or the weights are "
    "the recipe's and another number is reported, or the run stops itself.",
    "harmless": "All others: no harm that so short a run can measure. The gates do not run on them.",
    "stopped": "A gate fails a harmful mutant.",
    "survived": "Every gate passes a harmful mutant.",
}


def summary(rows: list[Row], runs: list[Row]) -> dict[str, Any]:
    """Return everything that the page says, as plain values."""
    # Not those of other steps, or of a larger sample
    drawn = {run["recipe"]: {*run["keys"]} for run in runs if "keys" in run}
    rows = [r for r in rows if r["kind"] != "mutants" or r["key"] in drawn.get(r["recipe"], {r["key"]})]
    found: dict[str, Any] = {
        "written": time.strftime("%Y-%m-%d"),
        "commits": sorted({r["commit"] for r in rows}),
        "rules": RULES,
    }
    found |= shares(rows)
    found["by_recipe"] = {recipe: {"seeds": sorted({r["seed"] for r in own if r["kind"] != "mutants"}), **shares(own)}
                          for recipe, own in grouped(rows, "recipe").items()}  # fmt: skip
    found["by_row"] = {row: {k: v for k, v in shares(own).items() if k in ("caught", "named_first")}
                       for row, own in grouped([r for r in rows if r["kind"] == "planted"], "row").items()}  # fmt: skip
    mutants = [r for r in rows if r["kind"] == "mutants"]
    outcomes = ("crashed", "equal", "harmless", "stopped", "survived")
    for field in ("recipe", "mutation", "part"):
        found[f"mutants_by_{field}"] = {name: {o: sum(r["outcome"] == o for r in own) for o in outcomes}
                                        for name, own in grouped(mutants, field).items()}  # fmt: skip
    found["mutant_runs"] = [{k: v for k, v in run.items() if k != "keys"} for run in runs]
    found["rows"] = rows
    return found


def shares(rows: list[Row]) -> dict[str, dict[str, Any]]:
    """Return the fractions of planted bugs caught and explained, of false alarms, and of harmful mutants stopped."""
    planted, healthy, mutants = ([r for r in rows if r["kind"] == kind] for kind in ("planted", "healthy", "mutants"))
    harmful = [r for r in mutants if r["outcome"] in ("stopped", "survived")]
    return {
        "caught": share(planted, lambda r: r["outcome"] == "caught"),
        "named_first": share([r for r in planted if r["outcome"] == "caught"], named_first),
        "false_alarms": share(healthy, lambda r: r["outcome"] == "alarm"),
        "mutants_stopped": share(harmful, lambda r: r["outcome"] == "stopped"),
    }


def named_first(row: Row) -> bool:
    """Return whether the gate that should stop a bug is the first that fails, and names the cause."""
    return row["first"] == row["gate"] and row["named"]


def grouped(rows: Iterable[Row], field: str) -> dict[str, list[Row]]:
    """Return {value of the field: rows}, in alphabetical order."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(str(row.get(field, "")), []).append(row)
    return dict(sorted(found.items()))


def share(rows: list[Row], good: Callable[[Row], bool]) -> dict[str, Any]:
    """Return {hits, of, low, high}: a fraction with its interval."""
    hits = sum(map(good, rows))
    low, high = wilson(hits, len(rows))
    return {"hits": hits, "of": len(rows), "low": round(low, 3), "high": round(high, 3)}


def words(s: dict[str, Any]) -> str:
    """Return a fraction in words: `9 of 10: 0.900 [0.596, 0.982]`."""
    if not s["of"]:
        return "none run"
    return f"{s['hits']} of {s['of']}: {s['hits'] / s['of']:.3f} [{s['low']:.3f}, {s['high']:.3f}]"


def summary_lines(found: dict[str, Any]) -> list[str]:
    """Return the lines that the command prints at its end."""
    names = {"caught": "planted bugs caught", "named_first": "  cause named first", "false_alarms": "false alarms",
             "mutants_stopped": "harmful mutants stopped"}  # fmt: skip
    lines = [f"{label:<24} {words(found[name])}" for name, label in names.items() if found[name]["of"]]
    mutants = [r for r in found["rows"] if r["kind"] == "mutants"]
    if mutants:
        aside = {o: sum(r["outcome"] == o for r in mutants) for o in ("crashed", "equal", "harmless")}
        lines.append("mutants set aside        " + ", ".join(f"{n} {name}" for name, n in aside.items()))
    for row in (r for r in found["rows"] if r["outcome"] in ("missed", "alarm", "survived")):
        detail = row.get("harm") or row["note"]
        lines.append(f"{row['outcome']:<9} {row['recipe']} {row['case']}" + (f": {detail}" if detail else ""))
        if row["outcome"] == "survived":
            lines += [f"          {text}" for text in changed_lines(row["patch"]).splitlines()]
    return lines


def write(home: Path, found: dict[str, Any]) -> Path:
    (home / "bugs.json").write_text(json.dumps(found, indent=1))
    cases, mutants = ([r for r in found["rows"] if (r["kind"] == "mutants") is wanted] for wanted in (False, True))
    names = ("Planted bugs and healthy variants",) * bool(cases) + ("Mutants",) * bool(mutants)
    title = ", ".join(names) or "No cases"
    hero = tag("p", esc(f"commit {', '.join(found['commits'])} · {found['written']}"), class_="eyebrow")
    hero += tag("h1", title)
    labels = (("caught", "planted bugs caught"), ("named_first", "of the caught ones: cause named first"),
              ("false_alarms", "healthy variants with a false alarm"), ("mutants_stopped", "harmful mutants stopped"))  # fmt: skip
    shares = ("caught", "named_first", "false_alarms") * bool(cases) + ("mutants_stopped",) * bool(mutants)
    hero += table(
        (), [[esc(label), esc(words(found[name]))] for name, label in labels if name in shares], class_="plain"
    )
    body = (_mutants(found, mutants) if mutants else "") + (_cases(found, cases) if cases else "")
    header = tag("header", tag("div", hero), class_="hero alone")
    path = home / "bugs.html"
    path.write_text(page(title, header, body, "trainworthy bugs"), encoding="utf-8")
    return path


def _cases(found: dict[str, Any], rows: list[Row]) -> str:
    body = section("Misses and false alarms first", tag("div", _wrong(rows), class_="card"))
    columns, heads = ("caught", "named_first", "false_alarms"), ("caught", "cause named first", "false alarms")
    cells = [[esc(r), esc(", ".join(map(str, of["seeds"]))), *(esc(words(of[c])) for c in columns)]
             for r, of in found["by_recipe"].items() if of["seeds"]]  # fmt: skip
    body += section("By recipe", tag("div", table(("recipe", "seeds", *heads), cells, class_="plain"), class_="card"))
    if found["by_row"]:
        cells = [[esc(row or "none"), *(esc(words(of[c])) for c in columns[:2])] for row, of in found["by_row"].items()]
        body += section(
            "By row of the catalogue", tag("div", table(("row", *heads[:2]), cells, class_="plain"), class_="card")
        )
    body += section("Rules", tag("ul", "".join(tag("li", esc(rule)) for rule in RULES.values()), class_="card"))
    cells = [[esc(f"{r['recipe']} {r['case']}"), esc(r["kind"]), esc(r["seed"]), esc(r["outcome"]), esc(r["first"]), esc(r["note"])]
             for r in rows]  # fmt: skip
    heads = ("case", "kind", "seed", "outcome", "first gate that failed", "what it says")
    return body + section("Every case", tag("div", table(heads, cells, class_="plain"), class_="card"))


def _wrong(rows: list[Row]) -> str:
    found = [r for r in rows if r["outcome"] in ("missed", "alarm")]
    found += [r for r in rows if r["kind"] in ("planted", "healthy") and r["outcome"] == "crashed"]
    found += [r for r in rows if r["outcome"] == "caught" and not named_first(r)]
    cells = [[esc(f"{r['recipe']} {r['case']}"), esc(r["seed"]), esc("cause not named first" if r["outcome"] == "caught" else
              r["outcome"]), esc(r["first"]), esc(r["note"] or r.get("known", ""))] for r in found]  # fmt: skip
    heads = ("case", "seed", "what happened", "first gate that failed", "what it says")
    return table(heads, cells, class_="plain") if cells else note("None.")


def _mutants(found: dict[str, Any], rows: list[Row]) -> str:
    """Return the sections about mutants, survivors first."""
    survivors = [card(f"{r['recipe']}: {r['case']}", note(r["harm"]) + tag("pre", esc(r["patch"])))
                 for r in rows if r["outcome"] == "survived"]  # fmt: skip
    body = section("Survivors", "".join(survivors), "Harmful mutants that every gate passed.")
    inner = ""
    for run in found["mutant_runs"]:
        text = (f"{run['recipe']}: {run['found']} mutants; {run['executed']} change a line that {run['steps']} steps execute; "
                f"{run['run']} of these were run. Healthy runs end at {run['metric']} "
                f"{', '.join(f'{v:.4g}' for v in run['healthy'])}; harm is {run['rule']}.")  # fmt: skip
        inner += note(text)
    heads = ("", "crashed", "equal", "harmless", "stopped", "survived")
    for field, title in (("recipe", "By recipe"), ("mutation", "By kind"), ("part", "By part of the recipe")):
        cells = [[esc(name), *(esc(of[o]) for o in heads[1:])] for name, of in found[f"mutants_by_{field}"].items()]
        inner += card(title, table(heads, cells, class_="plain"))
    body += section("Counts", inner, "A mutant is one small change of the source.")
    rules = "".join(tag("li", tag("b", name) + esc(f": {rule}")) for name, rule in MUTANT_RULES.items())
    body += section("Outcomes", tag("ul", rules, class_="card"))
    order = ("survived", "stopped", "harmless", "equal", "crashed")
    says = lambda r: tag("pre", esc(". ".join(filter(None, (r.get("harm"), r["note"])))), class_="note")  # noqa: E731
    cells = [[esc(r["case"]) + tag("pre", esc(changed_lines(r["patch"]))) + says(r), esc(r["outcome"]), esc(r["first"])]
             for r in sorted(rows, key=lambda r: (r["recipe"], order.index(r["outcome"])))]  # fmt: skip
    heads = ("mutant, and what the run or the gate says", "outcome", "first gate that failed")
    return body + section("Every mutant", tag("div", table(heads, cells, class_="plain"), class_="card"))


def changed_lines(patch: str) -> str:
    """Return a patch's lines without the places, and without the indentation that all of them have."""
    lines = [text for text in patch.splitlines() if not text.startswith("@@")]
    indent = min((len(text[1:]) - len(text[1:].lstrip()) for text in lines if text[1:].strip()), default=0)
    return "\n".join(f"{text[0]} {text[1 + indent :]}" for text in lines)
