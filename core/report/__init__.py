"""report.html: one self-contained page about a run folder in any state, with its curves also as plots/*.png.

The page loads nothing: images are data URIs, curves are inline SVG.
"""

import re
from pathlib import Path

from trainworthy.core.base.files import write_whole
from trainworthy.core.report.bands import healthy
from trainworthy.core.report.charts import curves
from trainworthy.core.report.data_section import data_section
from trainworthy.core.report.evidence import verdict_table
from trainworthy.core.report.folder import read
from trainworthy.core.report.html import page, section, tag
from trainworthy.core.report.sections import (
    earlier,
    figures,
    files_section,
    gate_section,
    hero,
    inputs,
    name_of,
    next_steps,
    predictions,
    tiles,
    verdict,
)
from trainworthy.core.report.setup_section import environment_section, settings_section


def write(folder: Path) -> Path:
    """Write `folder`/report.html and plots/*.png from the files that exist."""
    f = read(Path(folder))
    for stage in f.stages:
        write(stage.path)
    band = healthy(f)
    seconds = f.gates.get("seconds", 0)
    best = "✓: the prediction is right. Below it, and as shade: the probability of the right answer."
    if not tiles(f, "val"):
        best = "Below each prediction, and as shade: its score from 0% to 100%, as the recipe counts it."
    watched = verdict_table(f, f.monitors, of="Monitor") if f.monitors else ""
    parts = [
        ("What next", next_steps(f), ""),
        ("Earlier stages", earlier(f), "The stages that this one started from. Each has its own page."),
        ("Curves", curves(f), band.words(f) if band and band.unlike and f.steps else ""),
        ("Monitors", watched, "What was watched while it trained."),
        ("Gates", gate_section(f), f"Checks that had to pass before the full run. Together {seconds:.1f} s."),
        ("What the net saw", inputs(f), "Decoded from the tensors that go into the net."),
        ("Predictions on a fixed batch over time", predictions(f), best),
        ("Results in detail", figures(f), ""),
        ("Data", data_section(f), ""),
        ("Settings", settings_section(f), ""),
        ("Environment", environment_section(f), ""),
        ("Files and commands", files_section(f), ""),
    ]
    body = "".join(section(*p) for p in parts)
    links = re.findall(r'<section id="([^"]+)"><h2>([^<]+)</h2>', body)
    nav = tag("nav", "".join(tag("a", title, href="#" + anchor) for anchor, title in links), aria_label="Sections")
    path = f.path / "report.html"
    title = f"{name_of(f)}: {verdict(f)[1]}"
    write_whole(path, page(title, hero(f), body, f.path.absolute().name, nav=nav))
    return path
