"""The page of a guard: verdicts with their causes, the losses that the rehearsals saw."""

from pathlib import Path
from typing import Any

from trainworthy.core.report import PAGE, STYLE
from trainworthy.core.report.evidence import verdict_table
from trainworthy.core.report.folder import read
from trainworthy.core.report.html import esc, note, section, table, tag


def page(folder: Path, verdicts: list[dict[str, Any]], more: dict[str, Any]) -> str:
    """One self-contained HTML page."""
    failed = [v for v in verdicts if v["verdict"] == "fail"]
    watched = more.get("watched", {})
    script = Path(more.get("script", "")).name
    title = f"{script}: {len(failed)} of {len(verdicts)} checks failed" if failed else f"{script}: no check failed"
    hero = tag(
        "header",
        tag("div", tag("p", esc(f"trainworthy guard · {folder.name}"), class_="eyebrow") + tag("h1", esc(title))),
        class_="hero",
    )
    rows = [[esc(k), esc(watched.get(k, ""))] for k in ("steps", "backwards", "evaluations", "passes", "why")]
    body = section("Checks", verdict_table(read(folder), verdicts, of="Check"), f"Together {more.get('seconds', 0)} s.")
    shown = read(folder)
    if shown.steps:  # a real run that was watched
        from trainworthy.core.report.charts import curves

        body += section("Curves", curves(shown))
    body += section("What was watched", tag("div", table(("", ""), rows), class_="card"))
    held = watched.get("written", [])
    lost = watched.get("escaped", [])
    words = f"{len(held)} files went to a scratch folder." + (f" Not held back: {', '.join(lost[:10])}" if lost else "")
    body += section("Files", note(words)) if "written" in watched else ""
    return PAGE.format(title=esc(title), style=STYLE, hero=hero, nav="", body=body, name=esc(folder.name))
