"""One page about a study: the winner, isolation plots, ranges that were too short, every trial."""

import json
from pathlib import Path
from typing import Any

from trainworthy.core.base.as_json import finite
from trainworthy.core.base.files import write_whole
from trainworthy.core.report import intervals
from trainworthy.core.report.charts import Chart, chart_card, plain_powers
from trainworthy.core.report.html import code, esc, note, num, page, section, table, tag
from trainworthy.core.sweep.findings import Findings, Row, comparison, describe, rows_with
from trainworthy.core.sweep.space import Range

MARKS = list(zip(("line", "second", "good", "muted") * 2, "os^DvP*h", strict=True))
"""Colour and mark of each compared setting in the plots over a nuisance setting."""


def write(home: Path, recipe: str, f: Findings, lines: list[str], command: str) -> Path:
    """report.html of the study. `lines`: the result in sentences; `command`: trains the best trial again."""
    best = f.best
    title = f"Sweep of {Path(recipe).name if recipe.endswith('.py') else recipe}: {len(f.rows)} trials"
    hero = tag("p", esc(home.name), class_="eyebrow") + tag("h1", esc(title))
    if best is not None:
        hero += tag("p", f"<strong>{esc(num(best.value))}</strong> <span>{esc(f.metric)}, trial {best.number}</span>",
                    class_="number")  # fmt: skip
    hero += "".join(note(line) for line in lines)
    hero += code(command) if command else ""
    header = tag("header", tag("div", hero), class_="hero alone")
    lead = "For each compared value its best trial, then every trial over each nuisance setting."
    body = section("Isolation plots", _plots(f), lead)
    conclusions = [*(e.words() for e in f.edges), *comparison(f)]
    found = "".join(tag("p", esc(s)) for s in conclusions) + (code(f.wider_command) if f.wider_command else "")
    body += section("Conclusions", tag("div", found, class_="card") if conclusions else "")
    lead = "Infeasible: a gate failed, or the run stopped itself. Such a trial has no score."
    body += section("Trials", tag("div", _trials(f), class_="card"), lead)
    path = home / "report.html"
    write_whole(path, page(title, header, body, home.name))  # several processes write it
    write_whole(home / "result.json", json.dumps(finite(plain(f, lines, command)), indent=1, default=str))
    return path


def plain(f: Findings, lines: list[str], command: str) -> dict[str, Any]:
    return {"metric": f.metric, "higher_is_better": f.higher, "cost": f.cost or None,
            "best": f.best and vars(f.best), "summary": lines, "command": command,
            "each": [{"settings": c, "best": b and b.number, "value": b and b.value, "finished": n} for c, b, n in f.each],
            "edges": [{**vars(e), "wider": e.wider.words(), "words": e.words()} for e in f.edges],
            "wider_command": f.wider_command, "compared": comparison(f),
            "trials": [vars(r) for r in f.rows]}  # fmt: skip


def _trials(f: Findings) -> str:
    names = list(dict.fromkeys(k for r in f.rows for k in r.point))
    order = sorted(f.rows, key=lambda r: (r.value is None, -(r.value or 0) if f.higher else (r.value or 0), r.number))
    cells = []
    for r in order:
        score = esc(num(r.value)) if r.value is not None else esc(r.state)
        cells.append([f"trial {r.number}", score, *(esc(_setting(r.point.get(k, ""))) for k in names), esc(r.reason or r.diagnosis),
                      esc(f"{r.seconds:.0f} s"), esc(f"{r.cost['device_hours']:.2g}" if r.cost else "")])  # fmt: skip
    head = ("", f.metric, *names, "diagnosis of its curves, or why it is infeasible", "time", "device-hours")
    return table(map(esc, head), cells, class_="plain")


def _setting(value: Any) -> str:
    """Return a setting as it can be given again: 0.0005477 and not 0.0005."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _plots(f: Findings) -> str:
    charts = [_isolation(f)] if len(f.each) > 1 else []
    charts += [_scatter(f, one) for one in f.space.nuisance if not one.values]
    drawn = [chart_card(c) for c in charts]
    return tag("div", "".join(drawn), class_="charts") if f.best and drawn else ""


def _isolation(f: Findings) -> Chart:
    """Best value of each combination with its interval over seeds."""
    known = [(describe(c), b) for c, b, _ in f.each if b is not None]

    def draw(axes: Any, c: dict[str, str]) -> None:
        for y, (_, best) in enumerate(known):
            if len(best.values) > 1:
                axes.plot(intervals.interval(best.values), [y, y], "-", color=c["line"])
            axes.plot([best.value], [y], "o", color=c["line"], markersize=4)
        axes.set_ylim(-0.6, len(known) - 0.4)
        axes.set_yticks(range(len(known)), [name for name, _ in known])
        axes.locator_params(axis="x", nbins=4)
        axes.set_xlabel(f.metric, color=c["muted"])

    return Chart("isolation", "Each compared setting at its best", draw)


def _scatter(f: Findings, one: Range) -> Chart:
    """Every trial over one nuisance setting; infeasible trials are crosses at the bottom."""
    done = [r for r in f.rows if r.value is not None]
    lost: list[Row] = [r for r in f.rows if r.state == "infeasible" and one.name in r.point]

    def draw(axes: Any, c: dict[str, str]) -> None:
        for (chosen, *_), (colour, mark) in zip(f.each, MARKS, strict=False):
            mine = rows_with(chosen, done)
            label = describe(chosen) if mine and len(f.each) > 1 else None
            rates, scores = [r.point[one.name] for r in mine], [r.value for r in mine]
            axes.plot(rates, scores, mark, color=c[colour], markersize=4, label=label)
        if lost:  # on the lower axis: they have no score
            at, low = [r.point[one.name] for r in lost], [0.04] * len(lost)
            axes.plot(at, low, "x", color=c["muted"], label="infeasible", transform=axes.get_xaxis_transform())
        axes.margins(y=0.15)
        if one.log:
            axes.set_xscale("log")
            plain_powers(axes.xaxis)
        axes.set_xlim(one.low, one.high)
        axes.set_xlabel(one.name, color=c["muted"])

    return Chart(f"over-{one.name}", f"{f.metric} over {one.name}", draw)
