"""The integrity of thirteen sets: each change fits its script in one place, and the changed script compiles."""

import hashlib
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.guard import (
    eighteenth_set,
    eighteenth_set_heldout,
    eighth_set,
    eighth_set_heldout,
    hosted_set,
    hosted_set_heldout,
    nineteenth_set,
    nineteenth_set_heldout,
    ninth_set,
    ninth_set_heldout,
    seventeenth_set,
    seventeenth_set_heldout,
    sixteenth_set,
    sixteenth_set_heldout,
    trainer_set,
    trainer_set_heldout,
    twentieth_set,
    twentieth_set_heldout,
    twentyfifth_set,
    twentyfifth_set_heldout,
    twentyfirst_set,
    twentyfirst_set_heldout,
    twentyfourth_set,
    twentyfourth_set_heldout,
    twentysecond_set,
    twentysecond_set_heldout,
    twentythird_set,
    twentythird_set_heldout,
)
from tests.guard.guarding import guard
from tests.helpers.patches import ScriptPatch, patched


def first_byte(id: bytes) -> int:
    return hashlib.sha256(id).digest()[0]


def last_byte(id: bytes) -> int:
    return hashlib.sha256(id).digest()[-1]


SETS = {
    "eighth": (34, zlib.crc32, eighth_set, eighth_set_heldout),
    "ninth": (51, zlib.crc32, ninth_set, ninth_set_heldout),
    "hosted": (37, first_byte, hosted_set, hosted_set_heldout),
    "sixteenth": (53, last_byte, sixteenth_set, sixteenth_set_heldout),
    "seventeenth": (52, last_byte, seventeenth_set, seventeenth_set_heldout),
    "eighteenth": (48, last_byte, eighteenth_set, eighteenth_set_heldout),
    "nineteenth": (50, last_byte, nineteenth_set, nineteenth_set_heldout),
    "twentieth": (55, last_byte, twentieth_set, twentieth_set_heldout),
    "twentyfirst": (38, last_byte, twentyfirst_set, twentyfirst_set_heldout),
    "twentysecond": (42, last_byte, twentysecond_set, twentysecond_set_heldout),
    "twentythird": (42, last_byte, twentythird_set, twentythird_set_heldout),
    "twentyfourth": (40, last_byte, twentyfourth_set, twentyfourth_set_heldout),
    "twentyfifth": (44, last_byte, twentyfifth_set, twentyfifth_set_heldout),
    "trainer": (54, last_byte, trainer_set, trainer_set_heldout),
}
"""Name -> number of its cases, what puts an id into the open half (even) or into the closed one (odd), halves."""
CASES = [p for _, _, *halves in SETS.values() for half in halves for p in (*half.BUGS, *half.HEALTHY)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_every_change_fits_once_and_compiles(case: ScriptPatch) -> None:
    compile(patched(case), case.script, "exec")


@pytest.mark.parametrize(("count", "digest", "halves"), [(n, d, h) for n, d, *h in SETS.values()], ids=SETS)
def test_halves_are_split_by_the_ids_and_name_known_cases(count: int, digest: Callable, halves: list) -> None:
    ids = [p.id for half in halves for p in (*half.BUGS, *half.HEALTHY)]
    assert len(set(ids)) == len(ids) == count
    for remainder, half in enumerate(halves):
        assert all(digest(p.id.encode()) % 2 == remainder for p in (*half.BUGS, *half.HEALTHY))
        bugs = {p.id for p in half.BUGS}
        assert bugs >= half.HARMFUL
        assert bugs >= half.HONEST.keys()


def test_each_bug_of_the_sixteenth_set_names_the_thread_that_found_it() -> None:
    for half in (sixteenth_set, sixteenth_set_heldout):
        assert half.SOURCES.keys() == {p.id for p in half.BUGS}
        assert all(url.startswith("http") for url in half.SOURCES.values())


STOPPED = {
    "code_tagger--logits_returned_alone": "metric",
    "dpo_docs--reference_shares_storage": "frozen",
    "iso_dates--room_for_ten_tokens": "metric",
    "library_chat--end_marker_misspelt": "targets",
    "library_chat--padded_right_in_generation": "evaluated",
    "library_chat--space_after_header": "targets",
    "signature_qa--answers_cut_off": "targets",
    "signature_qa--held_out_not_removed": "samples",
    "source_lm_no_trainer--schedule_of_one_epoch": "schedule",
    "digits_resnet--statistics_in_bytes": "evaluated",
    "digits_resnet--test_labels_realigned": "names",
    "library_chat--second_turn_cut_off": "targets",
    "signature_qa--grouped_by_length": "names",
    "source_lm_no_trainer--iterator_made_once": "names",
    "beats_unet--label-not-rolled": "samples",
    "beats_unet--weights-inverted": "targets",
    "change_pairs--same-picture-twice": "names",
    "change_pairs--sigmoid-in-the-model": "loss-input",
    "crf_tagger--backpointers-in-order": "names",
    "crf_tagger--path-not-reversed": "names",
    "hierarchy_words--output-not-optimised": "wiring",
    "hierarchy_words--softmax-over-samples": "progress",
    "links_gnn--edges-reshaped": "names",
    "ranknet--test-not-normalised": "ending",
    "tumour_anomaly--encoder-detached": "wiring",
    "tumour_anomaly--relu-at-the-end": "loss-input",
    "tumour_anomaly--scaler-refitted": "names",
    "finetune_head--backbone-not-loaded": "state",
    "maze_dqn--max-of-own-values": "names",
    "maze_dqn--state-by-reference": "direction",
    "maze_dqn--state-kept": "names",
    "module_sentences--sorted-without-labels": "signal",
    "module_sentences--vocabulary-per-split": "samples",
    "stdlib_chars--mask-upside-down": "dependency",
}
"""Bug of a later set -> the check that fails."""


LATER = (*seventeenth_set.BUGS, *eighteenth_set.BUGS, *nineteenth_set.BUGS, *twentysecond_set.BUGS,
         *twentysecond_set_heldout.BUGS)  # fmt: skip


@pytest.mark.verify
@pytest.mark.parametrize("case", [p for p in LATER if p.id in STOPPED], ids=lambda case: case.id)
def test_a_bug_of_the_later_sets_is_stopped(case: ScriptPatch, tmp_path: Path) -> None:
    longer = {"--seconds": "6"} if STOPPED[case.id] == "signal" else {}  # a user's default: it needs two epochs
    assert guard(patched(case), tmp_path, **longer)[0][STOPPED[case.id]].blocks


@pytest.mark.verify
@pytest.mark.parametrize(
    "path",
    sorted({p.path for p in (*LATER, *eighteenth_set_heldout.BUGS, *nineteenth_set_heldout.BUGS)}),
    ids=lambda path: path.stem,
)
def test_a_healthy_script_of_the_later_sets_is_quiet(path: Path, tmp_path: Path) -> None:
    assert not [v.id for v in guard(path.read_text(), tmp_path)[0].values() if v.blocks]
