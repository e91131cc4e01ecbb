"""The third set from outside fits today's recipes. Messages name ids alone."""

import ast
import hashlib

import pytest

from tests.helpers import third_set, third_set_heldout
from tests.helpers.third_set_cases import edited

HALVES = (third_set, third_set_heldout)
CASES = [c for half in HALVES for c in (*half.BUGS, *half.HEALTHY)]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_edits_fit_the_recipe(number: int):
    case = CASES[number]
    assert case.edits or case.argv or case.data, case.id
    changed = ast.dump(ast.parse(edited(case))) != ast.dump(ast.parse(case.path.read_text()))
    assert changed == bool(case.edits), case.id


def test_split_by_hash_and_unique_ids():
    for number, half in enumerate(HALVES):
        for case in (*half.BUGS, *half.HEALTHY):
            assert hashlib.sha256(case.id.encode()).digest()[0] % 2 == number, case.id
    assert len({c.id for c in CASES}) == len(CASES)


def test_counts():
    assert sum(len(half.BUGS) for half in HALVES) == 32
    assert sum(len(half.HEALTHY) for half in HALVES) == 20
