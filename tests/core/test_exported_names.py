"""Class names in the files of an export: the same names in another order belong to other outputs."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from trainworthy.core.gates.checks.exported import renumbered
from trainworthy.core.recipe.stage import Field

NAMES = ["eight", "five", "four", "nine"]
IN_ORDER = ["four", "five", "eight", "nine"]


def stage(classes: list[str]) -> SimpleNamespace:
    fields = {"image": Field("input"), "label": Field("target", classes=classes)}
    return SimpleNamespace(data={"train": SimpleNamespace(fields=fields)})


@pytest.mark.parametrize(
    "config",
    [
        {"classes": IN_ORDER},
        {"id2label": {str(i): name for i, name in enumerate(IN_ORDER)}},
        {"label2id": {name: i for i, name in enumerate(IN_ORDER)}},
    ],
)
def test_the_same_names_in_another_order_are_found(config: dict, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = renumbered(stage(NAMES), tmp_path)
    assert "names output 0 'four'" in found
    assert "class 0 is 'eight'" in found
    assert "2 of 4 differ" in found


@pytest.mark.parametrize(
    "config",
    [
        {"classes": NAMES, "widths": [8, 16], "preprocessing": None},
        {"id2label": {str(i): name for i, name in reversed([*enumerate(NAMES)])}},
        {"id2label": {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2", "3": "LABEL_3"}},
        {"classes": ["acht", "fünf", "vier", "neun"]},
        {"classes": ["background", *IN_ORDER]},
        ["four", "five"],
    ],
)
def test_the_own_order_other_names_and_other_lists_are_no_fault(config, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert renumbered(stage(NAMES), tmp_path) == ""


def test_an_export_without_a_configuration_is_no_fault(tmp_path: Path):
    assert renumbered(stage(NAMES), tmp_path) == ""
