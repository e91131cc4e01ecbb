"""Code that gates, guard and recipes seldom run must not read an attribute that core's classes have lost to a rename."""

import re
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT

CLOSED = (
    "Stage|Run|GateContext|Rehearsal|Metric|Expect|Verdict|Finding|Journal|Skill|Probe|Monitor|Gate|Record|Field|Tile"
)
HOSTED = {("Stage", "ask"), ("Stage", "trainer")}  # of core/adapters/hosted.py's own kind of stage


def test_classes_of_core_have_every_attribute_that_is_read(tmp_path: Path):
    """mypy over the whole source, with every library as Any. `Data` and `Config` are open: subclasses add to them."""
    package = tmp_path / "trainworthy"
    package.mkdir()
    for part in [*(ROOT / "trainworthy").glob("*.py"), ROOT / "core", ROOT / "guard", ROOT / "recipes"]:
        (package / part.name).symlink_to(part)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file=", "-p", "trainworthy", "--follow-imports=skip", "--ignore-missing-imports",
         "--check-untyped-defs", "--cache-dir", str(tmp_path / "cache")], cwd=tmp_path, capture_output=True, text=True)  # fmt: skip
    assert "checked " in done.stdout, done.stdout + done.stderr
    found = re.findall(rf'(\S+:\d+): error: "({CLOSED})" has no attribute "(\w+)"', done.stdout)
    assert not [f"{place}: {kind}.{name}" for place, kind, name in found if (kind, name) not in HOSTED]
