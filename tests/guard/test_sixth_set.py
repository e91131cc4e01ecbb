"""The sixth set through the guard: its scripts are quiet, and the bugs that are stopped have their cause named."""

import re
from pathlib import Path

import pytest

from tests.guard import sixth_set
from tests.guard.guarding import SCRIPTS, guard
from tests.guard.test_guard import failed
from tests.helpers.patches import patched

HEALTHY = sorted(p.stem for p in (SCRIPTS / "sixth").glob("*.py"))
NAMED = {
    "pointnet--points_by_view": "view() or reshape() where",
    "tagger--tags_not_sorted": "a batch's rows are sorted or filtered",
}
"""Bugs that are stopped -> words of the cause that is named."""


@pytest.mark.verify
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_script_is_quiet(name: str, seed: int, tmp_path: Path):
    source = re.sub(r"((?i:seed = )|manual_seed\()0\b", rf"\g<1>{seed}", (SCRIPTS / "sixth" / f"{name}.py").read_text())
    verdicts, output, _ = guard(source, tmp_path)
    assert not failed(verdicts), output


@pytest.mark.verify
@pytest.mark.parametrize("name", NAMED)
def test_a_bug_is_stopped_and_named(name: str, tmp_path: Path):
    verdicts, output, _ = guard(patched(next(b for b in sixth_set.BUGS if b.id == name)), tmp_path)
    assert failed(verdicts), output
    assert NAMED[name] in output
