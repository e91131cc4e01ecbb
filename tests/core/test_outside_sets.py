"""The third to the nineteenth set from outside fit today's recipes. Messages name ids alone."""

import ast
import hashlib

import pytest

from tests.helpers.set_cases import edited
from tests.helpers.set_run import SETS, chosen

COUNTS = {
    "third": (32, 20),
    "fourth": (38, 18),
    "fifth": (27, 14),
    "sixth": (24, 8),
    "seventh": (28, 8),
    "eighth": (27, 12),
    "ninth": (0, 29),
    "tenth": (26, 18),
    "eleventh": (0, 32),
    "twelfth": (32, 8),
    "thirteenth": (0, 26),
    "fourteenth": (24, 16),
    "fifteenth": (0, 36),
    "sixteenth": (28, 12),
    "seventeenth": (24, 16),
    "eighteenth": (24, 16),
    "nineteenth": (26, 18),
}
CASES = [c for of in SETS for c in chosen(of, "both", "both", [])]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_edits_fit_the_recipe(number: int):
    case = CASES[number]
    assert case.edits or case.argv or case.data, case.id
    changed = ast.dump(ast.parse(edited(case))) != ast.dump(ast.parse(case.path.read_text()))
    assert changed == bool(case.edits), case.id


def test_split_by_hash_and_unique_ids():
    for name, halves in SETS.items():
        byte = -1 if name in ("fifteenth", "sixteenth", "seventeenth", "eighteenth", "nineteenth") else 0
        for number, half in enumerate(halves.values()):
            for case in (*half.BUGS, *half.HEALTHY):
                assert hashlib.sha256(case.id.encode()).digest()[byte] % 2 == number, case.id
    assert len({c.id for c in CASES}) == len(CASES)


@pytest.mark.parametrize("of", SETS)
def test_counts(of: str):
    assert tuple(len(chosen(of, "both", kind, [])) for kind in ("bugs", "healthy")) == COUNTS[of]


def test_harm_is_told():
    assert not [c.id for c in CASES if not c.harm]
