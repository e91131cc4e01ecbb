"""The catalogue of silent bugs: each is planted or says why not, and its page says what the suite does."""

import re
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT, collected, patched
from tests.helpers.catalogue import PAGE, ROWS, WITHOUT, looked, page, planted


def test_every_bug_is_planted_and_every_control_stands():
    bugs = planted()
    assert {bug for bug, plants in bugs.items() if not plants} == set(WITHOUT)
    assert not [control for control, variants in looked().items() if not variants]


def test_the_page_is_that_of_this_suite():
    assert PAGE.read_text() == page(), "python -m tests.helpers.catalogue"


def test_every_row_that_a_gate_a_planted_bug_or_a_page_names_is_in_the_catalogue():
    known = {row for kinds in ROWS.values() for row in kinds}
    named = {row for plant in collected("planted_*.py", "PLANTS") for row in re.findall(r"[A-Z]+\d+", plant.row)}
    sources = (path.read_text() for top in ("core", "guard", "recipes") for path in (ROOT / top).rglob("*.py"))
    named |= {row for text in sources for rows in re.findall(r'rows="([A-Z0-9 ]+)"', text) for row in rows.split()}
    pages = ((ROOT / "docs" / "gates.md"), *(ROOT / "docs" / "recipes").glob("*.md"))
    named |= {
        row
        for page in pages
        for rows in re.findall(r"\(Rows? ([^)]+)\.\)", page.read_text())
        for row in re.split(r",\s+", rows)
    }
    assert named <= known, named - known
    assert known <= named | {"C17", "R6", "L10", "W7", "W8"}, "monitors have these, and messages before a run"


def test_planted_bugs_and_healthy_variants_still_fit_their_recipes(tmp_path: Path):
    """Most of them run in `make verify` alone; a name that was renamed in the recipe shows here."""
    for one in (*collected("planted_*.py", "PLANTS"), *(h for h in collected("healthy_*.py", "VARIANTS") if h.hunk)):
        source = (ROOT / "recipes" / f"{one.recipe}.py").read_text()
        (tmp_path / f"{one.recipe.replace('/', '_')}--{one.id}.py").write_text(patched(source, one.hunk))
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", "--output-format", "concise"]
    done = subprocess.run([*ruff, str(tmp_path)], capture_output=True, text=True)
    # Of a name that its own line binds in the iteration before, ruff sees nothing
    unknown = [line for line in done.stdout.splitlines() if "F821" in line and "replay-of-views" not in line]
    assert not unknown, done.stdout
