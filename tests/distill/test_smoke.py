"""`make smoke DOMAIN=distill`: every recipe of the domain from its gates to its report."""

from pathlib import Path

import pytest

from tests.helpers.smoke import cases, smoke


@pytest.mark.parametrize("recipe", cases("distill"))
def test_from_gates_to_report(recipe: str, tmp_path: Path, stand_ins: Path):
    smoke(recipe, tmp_path, stand_ins)
