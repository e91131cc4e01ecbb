"""The page of a group of seeds: the numbers, and all their curves in common plots."""

import json
from pathlib import Path
from typing import Any

from trainworthy.core.base.files import write_whole
from trainworthy.core.report import html, intervals
from trainworthy.core.report.charts import Chart, chart_card, smooth
from trainworthy.core.report.folder import Folder, read, series
from trainworthy.core.report.groups import NAME, QUARTERS, card, collect, gates_in_words, rows, sentence, title
from trainworthy.core.report.html import bars, details, esc, note, num, section, table, tag


def write(folder: Path) -> dict[str, Any]:
    """Write seeds.json, card.md and report.html from the run folders of a group."""
    found = collect(folder)
    write_whole(folder / NAME, json.dumps(found, indent=1))
    write_whole(folder / "card.md", card(found))
    write_whole(folder / "report.html", (page if found["values"] else page_without_scores)(folder, found))
    return found


def page_without_scores(folder: Path, found: dict[str, Any]) -> str:
    """The HTML page of a group in which no seed has a score: how each seed ended, and its gates."""
    n, name = len(found["seeds"]), title(found)
    hero = tag("p", esc(f"{name}: {n} seeds · {folder.absolute().name}"), class_="eyebrow")
    hero += tag("h1", f"No score from {n} seeds")
    body = section("Each seed", _each(folder, found))
    body += section("Gates", _gates(found["gates"]), gates_in_words(found)) if found["gates"] else ""
    return html.page(f"{name}: no score", tag("header", tag("div", hero), class_="hero"), body, folder.absolute().name)


def _each(folder: Path, found: dict[str, Any]) -> str:
    """Links to the pages of the seeds; of those without a score, how they ended."""
    rows = []
    for seed in found["seeds"]:
        words = f"seed {seed}"
        if (folder / f"seed-{seed}" / "report.html").is_file() or str(seed) in found["values"]:
            words = tag("a", words, href=f"seed-{seed}/report.html")
        rows.append(tag("li", words + (f": {esc(found['ends'][str(seed)])}" if str(seed) in found["ends"] else "")))
    return tag("ul", "".join(rows), class_="card")


def page(folder: Path, found: dict[str, Any]) -> str:
    runs = [(seed, read(folder / f"seed-{seed}")) for seed in found["values"]]
    name, n = found["metric"], len(runs)
    heading = f"{title(found)}: {n} seeds"
    number = f"<strong>{esc(num(found['mean']))}</strong> <span>{esc(name)}, mean of {n} seeds</span>"
    hero = tag("p", esc(f"{heading} · {folder.absolute().name}"), class_="eyebrow")
    hero += tag("h1", esc(found["question"][:1].upper() + found["question"][1:])) + tag("p", number, class_="number")
    low, high = found.get("interval_95", (None, None))
    between = f"95% interval of the mean {low:.4f} to {high:.4f}. " if low is not None else ""
    hero += note(between + sentence(found))
    known = [(f"mean of {n} seeds", found["mean"], "model")]
    known += [(f"seed {s}", v, "model") for s, v in found["values"].items()]
    known += [(k, v, "other") for k, v in {**found["baselines"], "chance": found["floor"]}.items()]
    drawn = bars(known, high=found["ceiling"], caption=f"{name} of every seed, against baselines")
    header = tag("header", tag("div", hero) + tag("div", drawn, class_="card"), class_="hero")
    numbers = table(("", esc(name)), [[esc(k), esc(v)] for k, v in rows(found)])
    curves = "".join(map(chart_card, _charts(runs, name)))
    body = section("Curves", tag("div", curves, class_="charts"), "One line per seed.")
    if n >= QUARTERS:
        better, side = ("at least", "right") if found["higher_is_better"] else ("at most", "left")
        body += section("Performance profile", tag("div", chart_card(_profile(found)), class_="charts"),
                        f"The share of seeds that end with {better} this {name}. A curve further {side} is better. Its tail shows the "
                        "worst seeds, which an average hides.")  # fmt: skip
    body += section("Numbers", tag("div", numbers, class_="card"))
    body += section("Gates", _gates(found["gates"]), gates_in_words(found))
    body += section("Each seed", _each(folder, found))
    return html.page(heading, header, body, folder.absolute().name)


def _gates(found: dict[str, dict[str, str]]) -> str:
    """The verdicts of every gate by seed: first those that differ between seeds, or that are neither pass nor skip."""
    if not found:
        return ""
    names = list(dict.fromkeys(name for gates in found.values() for name in gates))
    cells = {name: [gates.get(name, "") for gates in found.values()] for name in names}
    odd = [name for name in names if len({*cells[name]}) > 1 or cells[name][0] not in ("pass", "skip")]
    head = ("", *(f"seed {esc(seed)}" for seed in found))

    def drawn(some: list[str]) -> str:
        return table(head, [[esc(name), *map(esc, cells[name])] for name in some])

    alike = [name for name in names if name not in odd]
    inner = drawn(odd) if odd else ""
    inner += details(f"{len(alike)} gates with the same verdict at every seed", drawn(alike)) if alike else ""
    return tag("div", inner, class_="card")


def _charts(runs: list[tuple[str, Folder]], name: str) -> list[Chart]:
    def over(tag_: str, steps: bool) -> Any:
        def draw(axes: Any, c: dict[str, str]) -> None:
            for _, f in runs:
                x, y = series(f.steps if steps else f.rows, tag_)
                x, y = smooth(x, y) if steps and len(x) else (x, y)
                axes.plot(x, y, "-" if steps else "-o", color=c["line"], alpha=0.6, linewidth=1, markersize=2)

        return draw

    return [Chart("metric", f"{name} on held-out data", over(f"val/{name}", False)),
            Chart("loss", "Training loss, smoothed", over("step/loss", True))]  # fmt: skip


def _profile(found: dict[str, Any]) -> Chart:
    """Fraction of the seeds that reach a score or better."""
    sign = 1 if found["higher_is_better"] else -1
    scores, share = intervals.profile([sign * v for v in found["values"].values()])

    def draw(axes: Any, c: dict[str, str]) -> None:
        x = [sign * s for s in scores]
        axes.step([found["floor"], *x, x[-1]], [1, *share, 0], "-", where="pre", color=c["line"])
        axes.set_ylim(0, 1.05)
        axes.set_xlabel(found["metric"], color=c["muted"])

    better = "at least" if found["higher_is_better"] else "at most"
    return Chart("profile", f"Share of {len(scores)} seeds with {better} this {found['metric']}", draw)
