"""The fifteenth set, eighteen setups with bugs through `trainworthy.check`: healthy ones pass, and what is stopped is named."""

import hashlib

import pytest

from tests.guard import fifteenth_set, fifteenth_set_heldout
from tests.guard.guarding import SCRIPTS
from tests.helpers.patches import ScriptPatch, patched

FOLDER = SCRIPTS / "fifteenth"
SCRIPT_NAMES = sorted(p.stem for p in FOLDER.glob("*.py"))
BUGS = {case.id: case for half in (fifteenth_set, fifteenth_set_heldout) for case in half.BUGS}


@pytest.mark.parametrize("case", BUGS.values(), ids=lambda case: case.id)
def test_every_change_fits_once_and_is_in_its_half(case: ScriptPatch) -> None:
    compile(patched(case), case.script, "exec")
    odd = hashlib.sha256(case.id.encode()).digest()[0] % 2 == 1
    assert case.source == ("fifteenth_set_heldout.py" if odd else "fifteenth_set.py")


def test_every_setup_has_two_bugs() -> None:
    assert len(SCRIPT_NAMES) == 18
    assert sorted(id.partition("--")[0] for id in BUGS) == sorted(SCRIPT_NAMES * 2)
