"""The guard's report page: verdicts with causes, and the losses of the rehearsals."""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainworthy.core.base.verdict import Verdict
from trainworthy.core.report import html
from trainworthy.core.report.evidence import verdict_table
from trainworthy.core.report.folder import read
from trainworthy.core.report.html import esc, note, section, table, tag
from trainworthy.guard.checks.results import nearest

NAMES = {
    "steps": "optimiser steps",
    "backwards": "backward() calls",
    "evaluations": "evaluations",
    "passes": "passes over loaders",
    "why": "why it ended",
}


def page(folder: Path, verdicts: list[dict[str, Any]], more: dict[str, Any]) -> str:
    """Return one self-contained HTML page."""
    failed = [v for v in verdicts if v["verdict"] in ("fail", "advice")]
    watched = more.get("watched", {})
    script = Path(more.get("script", "")).name
    title = f"{script}: {len(failed)} of {len(verdicts)} checks failed" if failed else f"{script}: no check failed"
    hero = tag("p", esc(f"trainworthy {more.get('command', 'guard')} · {folder.name}"), class_="eyebrow")
    hero += tag("h1", esc(title))
    if stopped := [Verdict(**v) for v in failed if v["verdict"] == "fail"]:
        first = nearest(stopped)
        hero += tag("p", esc(f"Likely cause ({first.id}): {first.remedy.splitlines()[0]}"))
    rows = [[esc(name), esc(watched.get(k, ""))] for k, name in NAMES.items()]
    record = read(folder)
    body = section("Checks", verdict_table(record, verdicts, of="Check"), f"Together {more.get('seconds', 0)} s.")
    if record.steps:  # a real run that was watched
        from trainworthy.core.report.charts import curves

        body += section("Curves", curves(record))
    body += section("What was observed", tag("div", table(("", ""), rows), class_="card"))
    held = watched.get("written", [])
    lost = watched.get("escaped", [])
    words = f"{len(held)} files went to a scratch folder." + (
        f" Written outside it: {', '.join(lost[:10])}" if lost else ""
    )
    body += section("Files", note(words)) if "written" in watched else ""
    return html.page(title, tag("header", tag("div", hero), class_="hero"), body, folder.name)


def write(out: Path, verdicts: list[Any], **more: Any) -> Path:
    """Write gates.json, args.json and the page."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "gates.json").write_text(json.dumps({"gates": [asdict(v) for v in verdicts], **more}, indent=1, default=str))
    (out / "args.json").write_text(
        json.dumps({"argv": sys.argv[1:], "cwd": os.getcwd(), "kind": "guard", "recipe": more["script"]}, indent=1)
    )
    path = out / "report.html"
    path.write_text(page(out, [asdict(v) for v in verdicts], more), encoding="utf-8")
    return path
