"""The bugs and variants that nobody designed a check for fit today's scripts and recipes. Messages name ids alone."""

import ast
import hashlib

import pytest

from tests.guard import (
    common_scripts,
    common_scripts_heldout,
    fifth_set,
    fifth_set_heldout,
    outside,
    sixth_set,
    unseen,
    unseen_heldout,
)
from tests.helpers import unseen_forks, unseen_forks_heldout, unseen_recipes, unseen_recipes_heldout
from tests.helpers.patches import patched

HALVES = {
    "guard": (unseen, unseen_heldout),
    "recipes": (unseen_recipes, unseen_recipes_heldout),
    "forks": (unseen_forks, unseen_forks_heldout),
    "common scripts": (common_scripts, common_scripts_heldout),
    "fifth set": (fifth_set, fifth_set_heldout),
}
PATCHES = [p for halves in HALVES.values() for half in halves for p in (*half.BUGS, *half.HEALTHY)]
PATCHES += [*outside.HALF_A, *outside.HALF_B, *sixth_set.BUGS]


@pytest.mark.parametrize("number", range(len(PATCHES)))
def test_patch_fits_its_file(number: int):
    patch = PATCHES[number]
    before = patch.path.read_text()
    assert ast.dump(ast.parse(patched(patch))) != ast.dump(ast.parse(before)), f"{patch.id} changes nothing that runs"


@pytest.mark.parametrize("name", HALVES)
def test_split_by_hash(name: str):
    for number, half in enumerate(HALVES[name]):
        for patch in (*half.BUGS, *half.HEALTHY):
            assert hashlib.sha256(patch.id.encode()).digest()[0] % 2 == number, patch.id


@pytest.mark.parametrize("name", HALVES)
def test_ids_are_unique(name: str):
    ids = [p.id for half in HALVES[name] for p in (*half.BUGS, *half.HEALTHY)]
    assert len(ids) == len(set(ids))
