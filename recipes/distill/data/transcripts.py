"""Recordings with the teacher's transcripts: the labels of a student that hears the same sound.

The teacher's transcript is kept for every recording. Training uses those with few wrong words, compared with the recording's own
transcript. Held-out recordings are all kept, so that the student's score is not flattered. Made once and cached; sound in files stays
there and is read when needed.
"""

import json
from collections import Counter
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from trainworthy.core.base.errors import UserError
from trainworthy.core.data.assets import built
from trainworthy.core.data.validation_split import absolute
from trainworthy.recipes.distill.data import arrays, recordings
from trainworthy.recipes.shared import speech, whisper

from trainworthy import core

VERSION = 3  # version of the cached files
FULL = 32767  # int16


@dataclass
class Source:
    """Recordings and their teacher."""

    path: str = "synthesised"
    """`synthesised`, or a folder with recordings (wav, flac, ogg, mp3) and a metadata.csv: file_name, transcription, group."""
    sentences: int = 440
    """Sentences to synthesise."""
    teacher: str = "tiny.en"
    """The packaged `tiny.en` or `base`, or the hub name or folder of a Whisper (openai/whisper-medium.en); a multilingual one transcribes
    English."""
    seconds: int = 6
    """Window of both models in seconds; longer recordings are left out. Whisper's own is 30, which costs seven times more."""
    max_wer: float = 0.1
    """Largest word error rate of the teacher's transcript of a training recording."""
    max_bad: float = 0.01
    """Largest share of recordings that cannot be read. They are left out, counted and named; a larger share is an error."""

    def __post_init__(self):
        self.path = absolute(self.path, "synthesised")


@dataclass
class Transcripts:
    """Every audible recording, in order."""

    spans: Tensor
    """Samples at 16 kHz, (N,)."""
    held_out: Tensor
    """Which recordings are held out, (N,) bool."""
    spoken: list[str]
    """The recording's own transcript."""
    wrote: list[str]
    """The teacher's transcript."""
    left_out: dict[str, int]
    files: list[str]
    """Its sound, if that is in files; else in `waves`."""
    waves: Tensor | None = None
    """Samples of all recordings, (sum of spans,) int16."""

    def __post_init__(self):
        self.starts = (self.spans.cumsum(0) - self.spans).tolist()
        self.wrong = [whisper.word_error_rate([s], [w]) for s, w in zip(self.spoken, self.wrote, strict=True)]

    def wave(self, index: int) -> np.ndarray:
        """Return the samples (n,) float32 at 16 kHz."""
        if self.waves is None:
            return recordings.sound(arrays.Row(0, Path(self.files[index]), "", None, 0, 0)).at_16k()
        start = self.starts[index]
        return self.waves[start : start + int(self.spans[index])].numpy().astype(np.float32) / FULL

    def split(self, max_wer: float) -> tuple[list[int], list[int], dict[str, str]]:
        """Return (training recordings, held-out recordings, notes)."""
        held = self.held_out.tolist()
        learn = [i for i, wrong in enumerate(self.wrong) if not held[i] and wrong <= max_wer]
        val = [i for i, out in enumerate(held) if out]
        others, left_out = len(held) - len(val), ", ".join(f"{n} {why}" for why, n in self.left_out.items()) or "none"
        notes = {
            "labels": f"{len(learn)} of {others} recordings to learn from kept ({len(learn) / max(1, others):.0%}), those of which "
            f"the teacher has at most {max_wer:.0%} of the words wrong; of {len(val)} held out all; unfit before: {left_out}",
            "teacher": f"word error rate {self.teachers(val):.3f} on what is held out"
            if val
            else "nothing is held out",
        }
        if len(learn) < recordings.HELD_OUT or not val:
            raise UserError("too few recordings are left", got=notes["labels"],
                            needed=f"{recordings.HELD_OUT} to learn from, some held out",
                            cause="transcripts of other recordings, another language, silence, --data.seconds, --data.max-wer",
                            next="listen to one, and compare it with its transcript")  # fmt: skip
        return learn, val, notes

    def teachers(self, which: list[int]) -> float:
        """Return the teacher's word error rate on these recordings."""
        return whisper.word_error_rate([self.spoken[i] for i in which], [self.wrote[i] for i in which])


def load(source: Source, skip: int = 0) -> Transcripts:
    """Return the transcripts of a source without its first `skip` sentences: from the cache, or made now."""
    key = {k: v for k, v in asdict(source).items() if k != "max_wer"} | {"version": VERSION}
    key |= {"skip": skip} if skip else {}
    if source.path == "synthesised":
        del key["max_bad"]
        key |= {"words": speech.SLOTS, "engine": version("espeakng-loader")}
    else:
        root = Path(source.path)
        key["files"] = sorted(
            (str(p.relative_to(root)), p.stat().st_size, p.stat().st_mtime_ns) for p in root.rglob("*")
        )
    made = built("distill-transcripts", key, lambda folder: _make(source, folder, skip))
    return Transcripts(
        **load_file(made / "transcripts.safetensors"), **json.loads((made / "transcripts.json").read_text())
    )


def _make(source: Source, into: Path, skip: int) -> None:
    """Transcribe every audible recording with the teacher, a batch at a time."""
    teacher, rows, left_out = whisper.load(source.teacher, source.seconds), [], Counter()
    if source.path == "synthesised":
        readers = recordings.synthesised(source.sentences)[skip:]
    else:
        root = Path(source.path)
        table = arrays.table(root / "metadata.csv", recordings.LAYOUT)
        rows = arrays.rows(root, table, rate=recordings.FPS, teacher=teacher)
        rows, excluded = arrays.allowed(root, rows, held_out=recordings.HELD_OUT)
        left_out += Counter({"that validation asks about": excluded})
        readers = [lambda row=row: recordings.sound(row) for row in rows]
    batch, kept = [], []

    def write() -> None:
        texts = teacher.write(
            teacher.hear([wave for *_, wave in batch]), at_most=len(teacher.prompt) + 8 * source.seconds
        )
        for (i, one, wave), text in zip(batch, texts, strict=True):
            sound = None if rows else torch.from_numpy((wave.clip(-1, 1) * FULL).round().astype(np.int16))
            kept.append((i, one.text, text, one.group % recordings.HELD_OUT == 0, len(wave), sound))
        batch.clear()

    for i, one in recordings.readable(readers, left_out, source.max_bad):
        if reason := recordings.unfit(wave := one.at_16k(), source.seconds):
            left_out[reason] += 1
            continue
        batch.append((i, one, wave))
        if len(batch) == recordings.BATCH:
            write()
    if batch:
        write()
    if not kept:
        raise UserError("no recording can be heard", got=", ".join(f"{n} {why}" for why, n in left_out.items()) or "none at all",
                        needed=f"{recordings.SHORTEST:g} to {source.seconds} s of sound that is not silent")  # fmt: skip
    where, spoken, wrote, held_out, spans, sounds = zip(*kept, strict=True)
    tensors = {"spans": torch.tensor(spans), "held_out": torch.tensor(held_out)}
    if not rows:
        tensors["waves"] = torch.cat(sounds)
    save_file(tensors, into / "transcripts.safetensors")
    words = {
        "spoken": spoken,
        "wrote": wrote,
        "left_out": left_out,
        "files": [str(rows[i].audio) for i in where] if rows else [],
    }
    (into / "transcripts.json").write_text(json.dumps(words, indent=1))


class Spoken(core.Data):
    """Spectrograms (mels, 2 x frames) of recordings, the teacher's words as ids, and the spoken text."""

    def __init__(self, source: Transcripts, which: list[int], teacher: whisper.Whisper):
        self.source, self.which, self.teacher = source, which, teacher
        self.ids = [teacher.ids(text) for text in source.wrote]
        self.longest = max(map(len, self.ids))
        self.fields = {"mel": core.Field("input"), "ids": core.Field("target"), "truth": core.Field("group")}

    def __len__(self) -> int:
        return len(self.which)

    def get(self, index: int, generator: torch.Generator | None) -> dict:
        return self.make(index, self.read(index), generator)

    def read(self, index: int) -> np.ndarray:
        # read from a file if the data are yours: --loader.threads reads ahead
        return self.source.wave(self.which[index])

    def make(self, index: int, got: np.ndarray, generator: torch.Generator | None) -> dict:
        ids = self.ids[self.which[index]]
        # `words` separates the end from padding
        padded = torch.tensor(ids + [self.teacher.end] * (self.longest - len(ids)))
        return {"mel": self.teacher.mel([got])[0], "ids": padded, "words": torch.tensor(len(ids)), **self.words(index)}

    def words(self, index: int) -> dict[str, str]:
        i = self.which[index]
        return {"text": self.source.wrote[i], "truth": self.source.spoken[i]}

    def peek(self, index: int, key: str):
        return self.words(index)[key] if key in ("text", "truth") else super().peek(index, key)

    def collate(self, samples: list[dict]) -> dict:
        batch = super().collate(samples)
        batch["ids"] = batch["ids"][:, : int(batch["words"].max())]  # no more padding than this batch needs
        return batch
