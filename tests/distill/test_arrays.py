"""distill/whisper from a sensor's own arrays: the same training pairs as from their sound, files read ahead, and what is wrong with tables
and files."""

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from scipy.signal import resample_poly
from trainworthy.core.base.config import Loader
from trainworthy.core.base.errors import UserError
from trainworthy.core.data import loader
from trainworthy.recipes.distill.data import arrays, recordings
from trainworthy.recipes.distill.whisper import Heard
from trainworthy.recipes.shared import speech, whisper

from tests.helpers.commands import losses, read, run_folder, stop, trainworthy

RATE = 16_000
COLUMNS = ("file_name", "transcription", "array", "rate", "frames")
FEW = 24
Change = Callable[[Path, list[dict]], None]


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recordings, and beside each what the recipe itself would read of it as an array: metadata.csv names both."""
    root = tmp_path_factory.mktemp("sensor")
    rows = []
    for i, text in enumerate(speech.sentences(FEW)):
        wave = resample_poly(speech.say(text), RATE, speech.RATE).astype(np.float32)
        soundfile.write(root / f"{i}.wav", wave, RATE, subtype="FLOAT")
        frames = recordings.envelope(wave).numpy()
        np.save(root / f"{i}.npy", frames.reshape(len(frames), 4, 4))  # as a small picture
        rows.append(
            {
                "file_name": f"{i}.wav",
                "transcription": text,
                "array": f"{i}.npy",
                "rate": recordings.FPS,
                "frames": len(frames),
            }
        )
    write(root, rows)
    return root


def write(root: Path, rows: list[dict]) -> None:
    with open(root / "metadata.csv", "w", newline="") as file:
        out = csv.DictWriter(file, list(rows[0]))
        out.writeheader()
        out.writerows(rows)


def rows_of(root: Path) -> list[dict]:
    with open(root / "metadata.csv", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def changed(spoken: Path, tmp_path: Path) -> Callable[[Change], Path]:
    """`changed(how)`: links to the recordings with a table and files that `how(folder, rows)` has changed."""

    def make(how: Change) -> Path:
        root = tmp_path / "sensor"
        root.mkdir()
        for path in spoken.iterdir():
            if path.suffix != ".csv":
                (root / path.name).symlink_to(path)
        rows = rows_of(spoken)
        how(root, rows)
        write(root, rows)
        return root

    return make


def replaced(root: Path, name: str, array: np.ndarray) -> None:
    (root / name).unlink()
    np.save(root / name, array)


def recordings_of(root: Path, **more) -> recordings.Recordings:
    return recordings.load(recordings.Source(path=str(root), **more))


# ---------------------------------------------------------------------------------------------------------- the samples
def test_an_array_of_the_sensor_gives_the_lessons_of_its_sound(spoken: Path, changed):
    """The same samples, bit for bit, whether held in memory or read from files, by one thread or several."""

    def without(root: Path, rows: list[dict]) -> None:
        rows[:] = [{k: row[k] for k in COLUMNS[:2]} for row in rows]

    theirs, ours = recordings_of(changed(without)), recordings_of(spoken)
    teacher = whisper.load("tiny.en", 6)
    which = list(range(len(theirs.texts)))
    assert ours.texts == theirs.texts
    assert len(which) > FEW // 2
    assert ours.envelopes is None
    assert ours.features is None
    for name in ("mean", "std", "ears_mean", "ears_std", "rest", "spans", "held_out"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    keys = [[(0, i) for i in which[s : s + 4]] for s in range(0, len(which), 4)]

    def read(source: recordings.Recordings, threads: int) -> list[dict]:
        settings = Loader(threads=threads, window=8)
        data = Heard(source, which, teacher)
        return list(loader.batches(data, keys, seed=0, settings=settings, device=torch.device("cpu")))

    whole = read(theirs, 0)
    for found in (read(ours, 0), read(ours, 4)):
        for a, b in zip(found, whole, strict=True):
            assert all(torch.equal(a[k], b[k]) if isinstance(b[k], torch.Tensor) else a[k] == b[k] for k in b)


def test_frames_of_zeros_are_frames(tmp_path: Path):
    """A black picture in the middle is no end of the recording; rows behind the last are."""
    frames = np.ones((30, 4, 4), np.uint8)
    frames[20:23] = 0
    np.save(tmp_path / "a.npy", frames)
    assert arrays.padded(tmp_path / "a.npy", 120).any(-1).tolist() == [True] * 30 + [False] * 90


def test_lines_of_a_group_stay_together(spoken: Path):
    lines = [{**row, "group": f"speaker {i % 6}"} for i, row in enumerate(rows_of(spoken))]
    found = arrays.rows(spoken, lines, rate=recordings.FPS, teacher=None)
    assert [row.group for row in found] == [i % 6 for i in range(FEW)]


@pytest.mark.verify
def test_stopped_and_resumed_with_threads_is_the_same_run(spoken: Path, tmp_path: Path):
    argv = ("run", "distill/whisper", "--data.path", spoken, "--gates.no-enabled", "--run.no-tensorboard", "--run.keep-checkpoints", "99",
            "--features.epochs", "6", "--task.epochs", "2", "--run.save-every", "0.1", "--loader.threads", "4")  # fmt: skip
    for name in ("whole", "part"):
        (tmp_path / name).mkdir()
    done = trainworthy(*argv, cwd=tmp_path / "whole")
    assert done.returncode == 0, done.stdout + done.stderr
    whole = run_folder(tmp_path / "whole")
    assert f"0 of {FEW}" in json.dumps(read(whole / "data.json"))
    code, said = stop(*argv, cwd=tmp_path / "part", once="runs/*/*/checkpoints/features/step-*")
    assert code == 5, said
    part = run_folder(tmp_path / "part")
    done = trainworthy("resume", part, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for stage in ("stages/features", "."):
        assert losses(part / stage) == losses(whole / stage)


# ------------------------------------------------------------------------------------------------------------ the table
def refused(root: Path, pattern: str, **more) -> None:
    with pytest.raises(UserError, match=pattern):
        recordings_of(root, **more)


def test_what_validation_asks_about_is_not_learnt(spoken: Path, changed, tmp_path: Path):
    """By the lists of `trainworthy data` in the folder; held-out lines stay, and the others stay where they were."""

    def listed(root: Path, rows: list[dict]) -> None:
        texts, chunk = [rows[i]["transcription"] for i in (0, 3)], " ".join(rows[6]["transcription"].split()[:4])
        (root / "exclude_texts.json").write_text(json.dumps(texts))
        (root / "exclude_chunks_min4.json").write_text(json.dumps([chunk]))

    root = changed(listed)
    teacher, lines = whisper.load("tiny.en", 6), rows_of(root)
    found = arrays.rows(root, lines, rate=recordings.FPS, teacher=teacher)
    kept, out = arrays.allowed(root, found, held_out=recordings.HELD_OUT)
    gone = [row.line - 2 for row in found if row not in kept]
    assert {3, 6} <= set(gone)
    assert (out, 0 in gone) == (len(gone), False)
    assert [row.group for row in kept] == [i for i in range(FEW) if i not in gone]
    story = recordings_of(root).story
    assert story["excluded"] == f"{out} that validation asks about"
    assert f"of {FEW - out} recordings" in story["lessons"]


def test_a_table_without_the_rate(changed):
    def how(root: Path, rows: list[dict]) -> None:
        for row in rows:
            del row["rate"]

    refused(changed(how), r"lacks a column(?s:.*)array, file_name, frames, rate, transcription")


def test_another_rate(changed, launch):
    """Through the command: exit 2 and one message."""

    def how(root: Path, rows: list[dict]) -> None:
        rows[3]["rate"] = 25

    done = launch("check", "distill/whisper", "--data.path", str(changed(how)), "--only", "schema")
    assert done.returncode == 2, done.shown
    assert "Traceback" not in done.stderr
    for words in ("line 5 of", "another rate", "25 frames a second", "needed:       20", "resample"):
        assert words in done.stderr


def test_a_rate_that_is_no_number(changed):
    refused(changed(lambda root, rows: rows[0].update(rate="fast")), r"line 2 of .*metadata\.csv is not in numbers")


def test_ids_of_another_tokenizer(changed):
    """Those of the English-only one pass, with or without prompt and end; the multilingual one's are refused."""
    teacher = whisper.load("tiny.en", 6)

    def theirs(root: Path, rows: list[dict]) -> None:
        for i, row in enumerate(rows):
            ids = teacher.ids(row["transcription"])
            row["ids"] = " ".join(map(str, ids if i % 2 else ids[2:-1]))
        rows[7]["ids"] = " ".join(
            str(i + 1) for i in teacher.ids(rows[7]["transcription"])
        )  # 50,258 starts the multilingual

    refused(
        changed(theirs), r"line 9 of .*the ids are not those of(?s:.*)50258(?s:.*)51,864(?s:.*)leave the column ids out"
    )


# ------------------------------------------------------------------------------------------------------------ the files
def missing(root: Path, rows: list[dict]) -> None:
    (root / "2.npy").unlink()


def silent_partner(root: Path, rows: list[dict]) -> None:
    (root / "2.wav").unlink()


def cut_short(root: Path, rows: list[dict]) -> None:
    half = (root / "2.npy").read_bytes()[:900]
    (root / "2.npy").unlink()
    (root / "2.npy").write_bytes(half)


def empty(root: Path, rows: list[dict]) -> None:
    replaced(root, "2.npy", np.zeros((0, 16), np.float32))


def shorter(root: Path, rows: list[dict]) -> None:
    replaced(root, "2.npy", np.load(root / "2.npy")[:-5])


def shorter_than_its_sound(root: Path, rows: list[dict]) -> None:
    shorter(root, rows)
    rows[2]["frames"] = int(rows[2]["frames"]) - 5


def not_finite(root: Path, rows: list[dict]) -> None:
    array = np.load(root / "2.npy")
    array[3, 1] = np.nan
    replaced(root, "2.npy", array)


def narrower(root: Path, rows: list[dict]) -> None:
    replaced(root, "2.npy", np.load(root / "2.npy")[:, :3])


def objects(root: Path, rows: list[dict]) -> None:
    (root / "2.npy").unlink()
    np.save(root / "2.npy", np.array([{}]), allow_pickle=True)


BROKEN = {
    missing: "is missing", silent_partner: "without its sound", cut_short: "is broken", empty: r"has no frames: \(0, 16\)",
    shorter: r"another length: \d+ frames, listed \d+", shorter_than_its_sound: "another length: .* s of sound",
    not_finite: "is not finite", narrower: "another shape: 12 channels, most have 16", objects: "is broken",
}  # fmt: skip


@pytest.mark.parametrize("how", BROKEN, ids=lambda how: how.__name__)
def test_a_file_that_cannot_be_used(changed, how: Change):
    """One of 24 is more than one in a hundred."""
    refused(
        changed(how),
        rf"too many arrays cannot be used(?s:.*)1 of 24: 2\.npy \(line 4\).*{BROKEN[how]}(?s:.*)at most 1\.0%",
    )


def test_below_the_share_they_are_left_out_counted_and_named(changed):
    root = changed(lambda root, rows: (not_finite(root, rows), (root / "9.npy").unlink()))
    story = recordings_of(root, max_bad=0.1).story
    assert story["arrays left out"] == "2 of 24: 2.npy (line 4) is not finite; 9.npy (line 11) is missing"
    assert "of 22 recordings" in story["lessons"]


def test_a_file_that_breaks_later_is_named(tmp_path: Path):
    with pytest.raises(UserError, match=r"a\.npy cannot be read(?s:.*)changed or removed"):
        arrays.padded(tmp_path / "a.npy", 120)
