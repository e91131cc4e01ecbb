"""The fifteenth set, eighteen setups with bugs through `trainworthy.check`: healthy ones pass, and what is stopped is named."""

import hashlib
from typing import Any

import pytest

import trainworthy
from tests.guard import fifteenth_set, fifteenth_set_heldout
from tests.guard.guarding import SCRIPTS
from tests.helpers.patches import ScriptPatch, patched
from tests.helpers.sampling import sample

FOLDER = SCRIPTS / "fifteenth"
SCRIPT_NAMES = sorted(p.stem for p in FOLDER.glob("*.py"))
READS_PADDING = "strips_ctc"
"""Its convolutions and its recurrent net read the padding of a batch, which `dependency` names."""
NAMED = {
    "digits_two_tasks--weight-sign": ("wiring", "by 'log_var' alone"),
    "spell_sft--cut-off": ("tokens", "max_length=8 is too short"),
    "spell_sft--no-space": ("tokens", "joins the end of the prompt and the start of the answer"),
    "cancer_logit--labels-of-first-rows": ("tiny-data", "labels shuffled before the split"),
    "strips_ctc": ("dependency", "padding is not masked"),
}
"""What is stopped since the first score -> the gate, and words of its likely causes."""
BUGS = {case.id: case for half in (fifteenth_set, fifteenth_set_heldout) for case in half.BUGS}


@pytest.mark.parametrize("case", BUGS.values(), ids=lambda case: case.id)
def test_every_change_fits_once_and_is_in_its_half(case: ScriptPatch) -> None:
    compile(patched(case), case.script, "exec")
    odd = hashlib.sha256(case.id.encode()).digest()[0] % 2 == 1
    assert case.source == ("fifteenth_set_heldout.py" if odd else "fifteenth_set.py")


def test_every_setup_has_two_bugs() -> None:
    assert len(SCRIPT_NAMES) == 18
    assert sorted(id.partition("--")[0] for id in BUGS) == sorted(SCRIPT_NAMES * 2)


def checked(name: str, only: str = "") -> Any:
    """The result of `trainworthy.check` for a setup, or for one with a bug."""
    text = patched(BUGS[name]) if name in BUGS else (FOLDER / f"{name}.py").read_text()
    space: dict[str, Any] = {"__name__": "fifteenth"}
    exec(compile(text, str(FOLDER / f"{name.partition('--')[0]}.py"), "exec"), space)
    return trainworthy.check(space.get("make_script") or space["make_trainer"], only=only or (), raises=False)


@pytest.mark.verify
@pytest.mark.parametrize("name", [name for name in SCRIPT_NAMES if name != READS_PADDING])
def test_a_healthy_setup_passes(name: str) -> None:
    result = checked(name)
    assert result.ok, result.table()


@pytest.mark.parametrize("name", sample(NAMED, "digits_two_tasks--weight-sign"))
def test_a_bug_is_stopped_and_named(name: str) -> None:
    gate, words = NAMED[name]
    result = checked(name, gate)
    assert any(words in v.cause + v.remedy for v in result.verdicts if v.blocks), result.table()


@pytest.mark.parametrize("name", ["number_words", "pixel_rows", "name_tagger"])
def test_a_false_alarm_of_the_first_score_is_gone(name: str) -> None:
    result = checked(name, "schema leakage")
    assert result.ok, result.table()
