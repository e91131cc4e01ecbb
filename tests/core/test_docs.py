"""Docs: what they say of commands and files is so, and the site builds."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.helpers import pages
from trainworthy.core.recipe.registry import recipes

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LOGS = ("verify.md", "migration.md", "LOG.md")


def test_the_page_of_commands_is_what_they_say():
    assert pages.PAGE.read_text() == pages.page(), "python -m tests.helpers.pages"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_command_in_a_page_exists(page: Path):
    """`trainworthy X RECIPE` in a code block: a command and a recipe that there are."""
    known = {*pages.commands(), "COMMAND"}
    ids = {e.id for e in recipes()}
    for block in re.findall(r"```[a-z]*\n(.*?)```", page.read_text(), re.S):
        for command, target in re.findall(r"^\s*(?:\.venv/bin/)?trainworthy ([a-z]+) +([\w./-]+)?", block, re.M):
            assert command in known, f"{page}: trainworthy {command}"
            if re.fullmatch(r"[a-z]+/[a-z]+", target or ""):
                assert target in ids or Path(target).parts[0] in ("runs", "path"), f"{page}: {target}"


@pytest.mark.parametrize("page", [p for p in PAGES if p.name not in LOGS], ids=lambda p: str(p.relative_to(ROOT)))
def test_every_file_that_a_page_names_exists(page: Path):
    for named in re.findall(r"`((?:core|recipes|tests|bench|docs|trainworthy)/[\w./-]+\.(?:py|json|md|png))`", page.read_text()):
        assert (ROOT / named).exists(), f"{page.relative_to(ROOT)} names {named}"


@pytest.mark.skipif(find_spec("mkdocs") is None, reason="the site's builder is not installed")
def test_the_site_builds(tmp_path: Path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "site" / "gates" / "index.html").is_file()
