"""`python -m tests.helpers.terminal` draws README's first two pictures: docs/terminal.svg, the real output of `trainworthy check` on a fork
with a softmax before its cross-entropy, and docs/report.png, the top of its report (needs chromium)."""

import io
import os
import pty
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text
from trainworthy.core.bugs import suite

from tests.conftest import ROOT

PICTURE, REPORT = ROOT / "docs" / "terminal.svg", ROOT / "docs" / "report.png"
WIDTH = 132  # columns; longer lines are cut
LOSS = 'F.cross_entropy(logits, batch["label"]'
GATES = ("schema", "data", "leakage", "initial-loss", "wiring", "overfit", "baseline", "export")
"""Gates that are drawn; an ellipsis takes the place of the others."""
COMMAND = "$ trainworthy check mine.py          # a fork with a softmax before its cross-entropy"


def output(folder: Path) -> str:
    """Return what the command writes to a terminal, with its colours."""
    suite.fork("vision/classify", folder / "mine.py", (LOSS, LOSS.replace("logits", "logits.softmax(-1)")))
    raw = bytearray()

    def keep(descriptor: int) -> bytes:
        part = os.read(descriptor, 65536)
        raw.extend(part)
        return part

    os.environ |= {"COLUMNS": "500", "TERM": "xterm-256color", "PYTHONSAFEPATH": "1"}
    os.chdir(folder)
    pty.spawn([sys.executable, "-m", "trainworthy", "check", "mine.py"], keep)
    return raw.decode().replace("\r", "")


def chosen(lines: list[Text]) -> list[Text]:
    """Return the lines to draw: those of GATES, and whatever is no gate's."""
    kept: list[Text] = []
    drawn = True
    for line in lines:
        words = line.plain.split()
        if line.plain.startswith("  ") and words and words[0] in ("pass", "skip", "FAIL"):
            drawn = words[1] in GATES
        elif not line.plain.startswith("         "):
            drawn = True
        if drawn:
            kept.append(line)
        elif kept[-1].plain != "  ...":
            kept.append(Text("  ..."))
    return kept


def draw(text: str) -> None:
    """Write the picture."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text(COMMAND, style="bold"))
    for line in chosen([Text.from_ansi(line) for line in text.rstrip().splitlines()]):
        if len(line) > WIDTH:
            line.truncate(WIDTH - 4)
            line.append(" ...")
        console.print(line, no_wrap=True, crop=True, highlight=False)
    PICTURE.write_text(console.export_svg(title="trainworthy"))


def photograph(folder: Path) -> None:
    """Write the picture of the report's top."""
    (page,) = folder.rglob("report.html")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1185,1700"]
    subprocess.run(["chromium", *options, f"--screenshot={REPORT}", page.as_uri()], check=True, capture_output=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        draw(output(Path(name)))
        photograph(Path(name))
