"""Data from your own sensor: one .npy file per recording, (frames, ...) of numbers, listed in metadata.csv with its sound.

Columns of metadata.csv, in any order:

file_name      the sound: wav, flac, ogg or mp3 of at least 16 kHz. Only the teacher reads it
transcription  what is said
array          the .npy file; axes after the first are flattened into channels (16 x 16 pixels are 256)
rate           frames per second; must be 20, since two frames of the student are five of the teacher
frames         number of frames
ids            optional: token ids of the transcription as another program cached them, separated by blanks; compared, not used
group          optional: speaker, session; a group is held out whole. Without it every fifth line is held out

A wrong rate, or ids of another tokenizer, concern the whole table and are an error. Single files that are missing, broken, of another
length or shape, or not finite are left out, counted and named, up to `--data.max-bad`.
"""

import csv
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile
import torch
from torch import Tensor
from trainworthy.core.base.errors import UserError
from trainworthy.core.data.loader import ahead
from trainworthy.core.data.texts import load_exclusions
from trainworthy.recipes.shared import whisper

THREADS, WINDOW = 16, 64  # parallel reads while a set is checked, and files in memory
APART = 0.1  # seconds by which an array and its sound may differ in length
LEAST = 1e-6  # value for a frame of zeros: to the student a row of zeros is padding
NAMED = 5  # files that a message names


@dataclass
class Row:
    """A line of the table."""

    line: int
    audio: Path
    text: str
    array: Path | None
    frames: int
    group: int
    """Rows with the same number go to the same split."""


def table(path: Path, layout: str) -> list[dict[str, str]]:
    """Return the lines of metadata.csv."""
    if not path.is_file():
        others = sorted(p for p in path.parent.glob("*") if p.suffix in (".tsv", ".csv", ".jsonl", ".json", ".txt"))
        raise UserError(f"no transcripts in {path.parent}", needed=layout,
                        got=" ".join(p.name for p in others or sorted(path.parent.glob("*")))[:200] or "nothing there",
                        cause="a table of another name or form" if others else "",
                        next=f"save {others[0].name} as {path.name}, with commas between the columns{_renamed(_header(others[0]))}"
                        if others else "")  # fmt: skip
    with open(path, newline="", encoding="utf-8-sig") as file:
        lines = csv.DictReader(file)
        names = set(lines.fieldnames or ())
        needed = {"file_name", "transcription"} | ({"array", "rate", "frames"} if "array" in names else set())
        if not needed <= names:
            raise UserError(f"{path} lacks a column", got=", ".join(lines.fieldnames or ["no header"]),
                            needed=layout if "array" not in names else ", ".join(sorted(needed)),
                            next=_renamed(lines.fieldnames or ()).removeprefix("; "))  # fmt: skip
        return list(lines)


USUAL = {
    "file_name": ("path", "file", "filename", "audio", "audio_path", "audio_filepath", "wav"),
    "transcription": ("sentence", "text", "transcript", "normalized_text", "label"),
}
"""Other tables' names of the columns (Common Voice, NeMo, LJ Speech)."""


def _renamed(names: Iterable[str]) -> str:
    """Return which columns to rename; empty if none has a usual other name."""
    found = [f"{old} to {new}" for new, others in USUAL.items() for old in names if new not in names and old in others]
    return f"; rename {', '.join(found)}" if found else ""


def _header(path: Path) -> list[str]:
    """Return the column names of a table, or the keys of its first row."""
    first = next(iter(path.read_text(encoding="utf-8-sig", errors="replace").splitlines()), "")
    keys = re.findall(r'"(\w+)"\s*:', first)
    return keys or [name.strip() for name in re.split(r"[\t,;|]", first)]


def rows(root: Path, lines: list[dict[str, str]], *, rate: int, teacher: whisper.Whisper) -> list[Row]:
    """Return the lines, checked without reading the arrays. Ids must come from the teacher's tokenizer."""
    groups: dict[str, int] = {}
    found = []
    for n, line in enumerate(lines):
        where = f"line {n + 2} of {root / 'metadata.csv'}"
        if not line["file_name"] or line["transcription"] is None:
            raise UserError(f"{where} is not complete", got=", ".join(str(v) for v in line.values() if v) or "an empty line",
                            needed="file_name and transcription")  # fmt: skip
        group = groups.setdefault(line["group"], len(groups)) if line.get("group") else n
        array = line.get("array")
        if array is not None:
            try:
                own, frames = float(line["rate"]), int(line["frames"])
            except ValueError as error:
                raise UserError(f"{where} is not in numbers", got=error, needed="rate and frames") from None
            if own != rate:
                raise UserError(f"{where}: the sensor has another rate", got=f"{own:g} frames a second", needed=f"{rate}",
                                cause="two frames of the student are five of the teacher's: time would run faster or slower",
                                next="resample the arrays")  # fmt: skip
        _same_ids(line, where, teacher)
        found.append(Row(n + 2, root / line["file_name"], line["transcription"], root / array if array is not None else None,
                         frames if array is not None else 0, group))  # fmt: skip
    # A sound that is missing beside an array is counted when the array is read.
    if lost := [row for row in found if row.array is None and not row.audio.is_file()]:
        listed = ", ".join(f"{row.audio.name} (line {row.line})" for row in lost[:5])
        raise UserError(f"{len(lost):,} of {len(found):,} recordings of {root / 'metadata.csv'} are not there",
                        got=listed + ", ..." * (len(lost) > 5), needed=f"the files that file_name names, from {root}",
                        cause="names without their folder or their ending" if len(lost) == len(found) else "a copy that was cut off",
                        next="copy them, or remove their lines")  # fmt: skip
    return found


def allowed(root: Path, found: list[Row], *, held_out: int) -> tuple[list[Row], int]:
    """Return (lines without the training lines on the folder's exclusion lists, how many these were). Every `held_out`th group is
    validation. `trainworthy data` writes the lists."""
    skip = load_exclusions(root)
    kept = [row for row in found if row.group % held_out == 0 or not skip(row.text)]
    return kept, len(found) - len(kept)


def _same_ids(line: dict[str, str], where: str, teacher: whisper.Whisper) -> None:
    """Raise UserError unless cached ids come from the training tokenizer, with or without prompt and end."""
    if not line.get("ids"):
        return
    ours = [str(i) for i in teacher.ids(line["transcription"])]
    words = ours[len(teacher.prompt) : -1]
    if line["ids"].split() not in (ours, words):
        raise UserError(f"{where}: the ids are not those of '{line['transcription']}'", got=line["ids"][:80],
                        needed=" ".join(words), cause="another tokenizer: the English-only vocabulary has 51,864 "
                        "entries, the multilingual one 51,865 and other ids for the same words",
                        next="leave the column ids out, or make it with the teacher's own tokenizer")  # fmt: skip


# ------------------------------------------------------------------------------------------------------------------ files
def read(path: Path) -> np.ndarray:
    """Return the array of a .npy file, (frames, channels) float32."""
    array = np.load(path, allow_pickle=False)
    if array.dtype.kind not in "fiub":
        raise ValueError(f"holds {array.dtype}, not numbers")
    if array.ndim == 0 or array.size == 0:
        raise ValueError(f"has no frames: {array.shape}")
    return array.reshape(len(array), -1).astype(np.float32)


def padded(path: Path, length: int) -> Tensor:
    """Return the frames, padded with rows of zeros to (length, channels)."""
    try:
        array = read(path)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{path} cannot be read", got=error, needed="an array of numbers, (frames, ...)",
                        cause="changed or removed since the set was surveyed",
                        next="start again: what cannot be read is left out") from None  # fmt: skip
    array[~array.any(1)] = LEAST
    out = torch.zeros(length, array.shape[1])
    out[: len(array)] = torch.from_numpy(array)
    return out


def survey(found: list[Row], *, rate: int, max_bad: float) -> tuple[list[Row], str]:
    """Return (rows whose files are complete, what is wrong with the others). Every array is read in full once, in parallel."""

    def look(row: Row) -> tuple[str, int]:
        try:
            array, sound = read(row.array), soundfile.info(row.audio).duration
        except FileNotFoundError:
            return "missing", 0
        except soundfile.LibsndfileError:
            return "without its sound" if not row.audio.exists() else "next to a sound file that cannot be read", 0
        except (OSError, ValueError, EOFError) as error:
            return str(error) if "frames" in str(error) or "numbers" in str(error) else "broken", 0
        if len(array) != row.frames:
            return f"of another length: {len(array)} frames, listed {row.frames}", 0
        if not np.isfinite(array).all():
            return "not finite", 0
        if abs(len(array) / rate - sound) > APART:
            return f"of another length: {len(array) / rate:.2f} s next to {sound:.2f} s of sound", 0
        return "", array.shape[1]

    seen = list(ahead(look, found, threads=THREADS, window=WINDOW))
    widths = Counter(width for reason, width in seen if not reason)
    usual = widths.most_common(1)[0][0] if widths else 0
    seen = [(reason or ("" if width == usual else f"of another shape: {width} channels, most have {usual}"))
            for reason, width in seen]  # fmt: skip
    bad = [f"{row.array.name} (line {row.line}) is {reason}" if not reason.startswith("ha") else
           f"{row.array.name} (line {row.line}) {reason}" for row, reason in zip(found, seen, strict=True) if reason]  # fmt: skip
    summary = (
        f"{len(bad):,} of {len(found):,}"
        + (": " if bad else "")
        + "; ".join(bad[:NAMED])
        + (", ..." if len(bad) > NAMED else "")
    )
    if len(bad) > max_bad * len(found):
        raise UserError("too many arrays cannot be used", got=summary, needed=f"at most {max_bad:.1%} (--data.max-bad)",
                        cause="paths of another folder; arrays that were cut, or written while the disk was full; a sensor that "
                        "gave nothing", next="correct them, or remove their lines")  # fmt: skip
    return [row for row, reason in zip(found, seen, strict=True) if not reason], summary
