"""Docs: what they say of commands and files is so, and the site builds."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from trainworthy.core import cli
from trainworthy.core.base import config
from trainworthy.core.recipe.loading import load
from trainworthy.core.recipe.registry import recipes
from trainworthy.guard.checks.results import CHECKS

from tests.conftest import ROOT
from tests.helpers import pages
from tests.helpers.commands import environment, execute, read, run_folder, trainworthy
from tests.helpers.sampling import sample

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "examples" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
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
    for named in re.findall(
        r"`((?:core|recipes|tests|bench|docs|trainworthy)/[\w./-]+\.(?:py|json|md|png))`", page.read_text()
    ):
        assert (ROOT / named).exists(), f"{page.relative_to(ROOT)} names {named}"


def test_every_setting_that_the_page_of_a_recipe_names_exists():
    every = [config.flags(load(e.id).module.Config) for e in recipes()]  # a page also runs other recipes
    options = "".join(map(cli.page, pages.commands())) + cli.HELP
    known = {f"--{flag}" for flags in every for flag in flags} | set(re.findall(r"--[a-z][\w.-]*", options))
    for page in sorted((ROOT / "docs" / "recipes").glob("*.md")):
        text = re.sub(
            r"### With lm-evaluation-harness.*?(?=\n## )", "", page.read_text(), flags=re.S
        )  # another program's options
        named = set(re.findall(r"(?<![\w-])--[a-z][\w.-]*\w", text))
        assert named <= known, (page.name, named - known)


def test_no_page_and_no_message_names_a_gate_by_its_old_name():
    old = config.of_recipes("renamed")["gates"]
    for page in (p for p in PAGES if p.name != "migration.md"):
        assert not [o for o in old if re.search(rf"`{o}`|\| {o} \|", page.read_text())], page
    for source in (p for top in ("core", "guard", "recipes") for p in (ROOT / top).rglob("*.py")):
        assert not [o for o in old if re.search(rf"(waive|only) {o}\b", source.read_text())], source


@pytest.mark.skipif(find_spec("mkdocs") is None, reason="the site's builder is not installed")
def test_every_module_in_the_migration_table_exists():
    named = set(re.findall(r"`trainworthy\.([\w.]+)`", (ROOT / "docs" / "migration.md").read_text()))
    assert named
    for path in (Path(*name.split(".")) for name in named):
        homes = (ROOT / path, ROOT / path.with_suffix(".py"), ROOT / "trainworthy" / path.with_suffix(".py"))
        assert any(home.exists() for home in homes), path


def test_the_site_builds(tmp_path: Path):
    # not with -q: it hides the warnings from --strict, too
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "site" / "gates" / "index.html").is_file()


def test_every_check_of_guard_has_a_section():
    page = (ROOT / "docs" / "guard-checks.md").read_text()
    assert set(re.findall(r"^### ([a-z-]+)$", page, re.M)) == set(CHECKS)


def test_the_loop_on_the_page_is_the_examples():
    page, example = (ROOT / "docs" / "own-scripts.md").read_text(), (ROOT / "examples" / "loop.py").read_text()
    (block,) = re.findall(r"```python\n(def factory.*?Loop\(.*?)\n\n\ntrainworthy", page, re.S)
    assert block in example


@pytest.mark.parametrize("name", sample(["plain_script", "hf_trainer", "loop"], "loop"))
def test_an_example_passes_its_gates_and_trains(name: str, tmp_path: Path):
    env = environment(PYTHONPATH=str(ROOT))
    done = execute(sys.executable, ROOT / "examples" / f"{name}.py", cwd=tmp_path, env=env, code=0)
    assert "FAIL" not in done.stdout


@pytest.mark.parametrize(
    "command", re.findall(r"^trainworthy (fork .*)$", (ROOT / "examples" / "README.md").read_text(), re.M)
)
def test_a_fork_of_each_domain(command: str, tmp_path: Path, launch):
    launch(*command.split(), code=0)
    assert (tmp_path / command.split()[-1]).is_file()


# ----------------------------------------------------------------------------------------------- the recipe of a page
@pytest.fixture
def tabular(tmp_path: Path) -> Path:
    """The whole recipe of docs/writing-a-recipe.md, saved as the page says."""
    page = (ROOT / "docs" / "writing-a-recipe.md").read_text()
    (source,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "STAGES = [digits]" in block]
    (tmp_path / "tabular.py").write_text(source)
    return tmp_path


def test_the_recipe_of_the_page_passes_and_its_gate_stops_the_bug_of_the_page(tabular: Path):
    done = trainworthy("check", "tabular.py", "--only", "schema,halves,overfit,evaluation", cwd=tabular, code=0)
    good = (tabular / "tabular.py").read_text()
    line = "pixels = self.pixels[index]\n"
    assert good.count(line) == 1
    page = (ROOT / "docs" / "writing-a-recipe.md").read_text()
    bug = re.search(r"`(pixels = self\.pixels\[index\] \* .*?)`", page)[1]
    (tabular / "buggy.py").write_text(good.replace(line, f"{bug}\n"))
    done = trainworthy("check", "buggy.py", "--only", "halves", cwd=tabular)
    assert (done.returncode, "outputs do not depend on the right half" in done.stdout) == (3, True), (
        done.stdout + done.stderr
    )


@pytest.mark.verify
def test_the_recipe_of_the_page_passes_every_gate_and_trains(tabular: Path):
    trainworthy("run", "tabular.py", cwd=tabular, code=0)
    assert read(run_folder(tabular) / "summary.json")["reported"]["accuracy"] > 0.9
