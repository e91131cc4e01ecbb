"""The ninth set's own integrity: each change fits its script in one place, and the changed script compiles."""

import zlib

import pytest

from tests.guard import ninth_set, ninth_set_heldout
from tests.helpers.patches import ScriptPatch, patched

HALVES = {0: ninth_set, 1: ninth_set_heldout}
CASES = [p for half in HALVES.values() for p in (*half.BUGS, *half.HEALTHY)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_every_change_fits_once_and_compiles(case: ScriptPatch) -> None:
    compile(patched(case), case.script, "exec")


def test_halves_are_split_by_the_ids() -> None:
    for remainder, half in HALVES.items():
        assert all(zlib.crc32(p.id.encode()) % 2 == remainder for p in (*half.BUGS, *half.HEALTHY))


def test_harmful_bugs_and_honest_endings_name_known_cases() -> None:
    assert len({p.id for p in CASES}) == len(CASES) == 51
    for half in HALVES.values():
        ids = {p.id for p in half.BUGS}
        assert ids >= half.HARMFUL
        assert ids >= half.HONEST.keys()
