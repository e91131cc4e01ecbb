"""What the student learns from: recordings as a cheap sensor would give them, with the features the teacher hears in them.

A lesson is kept only if the teacher's own transcript of it is the true one (a misheard word would be taught), and only if there
is something to hear. Made once, kept on disk.
"""

import csv
import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from scipy.signal import resample_poly
from torch import Tensor

from core.assets import built
from core.errors import UserError
from recipes.shared import speech, whisper

VERSION = 1  # of what is kept on disk: another number makes everybody's lessons anew
# The sensor: frames a second, bands, samples of each window (100 ms, half overlapping).
FPS, CHANNELS, WINDOW = 20, 16, 1600
LOWEST, HIGHEST = 80.0, 7_000.0  # Hz, ends of the bands, evenly spaced in mel
FLOOR = 1e-6  # energy that the sensor cannot tell from nothing
SHORTEST, QUIET = 0.3, 1e-3  # seconds, and root mean square (full scale: 1) below which nothing is said
HELD_OUT, BATCH = 5, 16  # every fifth recording; recordings that the teacher hears at once
LAYOUT = "metadata.csv with the columns file_name and transcription (the hub's audiofolder layout)"


@dataclass
class Source:
    """Recordings and their teacher."""

    path: str = "synthesised"
    """`synthesised`, or a folder with recordings (wav, flac, ogg, mp3) and a metadata.csv: file_name, transcription."""
    sentences: int = 440
    """Sentences to synthesise; the teacher mishears about one in seven, the rest are lessons."""
    teacher: str = "tiny.en"
    """The packaged `tiny.en`, or the hub name or folder of an English-only Whisper (openai/whisper-base.en)."""
    seconds: int = 6
    """Length of the canvas; longer recordings are left out. Whisper's own is 30, and costs five times as much."""


@dataclass
class Lessons:
    """Everything the student sees, in the order of the recordings."""

    envelopes: Tensor
    """(N, 20 x seconds, CHANNELS) log-energies, zero after the end."""
    spans: Tensor
    """(N,) frames of the teacher until a recording's end."""
    features: Tensor
    """(sum of spans, width) fp16, the teacher's frames one recording after the other."""
    rest: Tensor
    """(frames, width): mean of the teacher's frames at each place of the canvas where the recording has ended."""
    texts: list[str]
    held_out: Tensor
    """(N,) bool."""
    story: dict[str, str]
    """What was left out and why, for the data report."""

    def __post_init__(self):
        self.starts = (self.spans.cumsum(0) - self.spans).tolist()

    def heard(self, index: int) -> Tensor:
        """The teacher's features (span, width) of one recording, fp32."""
        start = self.starts[index]
        return self.features[start : start + int(self.spans[index])].float()

    def centre(self, which: list[int]) -> tuple[Tensor, Tensor]:
        """((frames, width) mean of the teacher at each place of the canvas over the speech of these recordings, (width,) standard
        deviation around it); where none of them speaks any more, the mean at rest."""
        total, square, count = (
            torch.zeros_like(self.rest),
            torch.zeros(self.rest.shape[1]),
            torch.zeros(len(self.rest), 1),
        )
        for i in which:
            total[: self.spans[i]] += self.heard(i)
            count[: self.spans[i]] += 1
        mean = torch.where(count > 0, total / count.clamp_min(1), self.rest)
        for i in which:
            square += (self.heard(i) - mean[: self.spans[i]]).square().sum(0)
        return mean, (square / count.sum()).sqrt()


# -------------------------------------------------------------------------------------------------------------- recordings
@dataclass
class Recording:
    wave: np.ndarray
    """(samples,) float32 at `rate`."""
    rate: int
    text: str
    name: str


def synthesised(n: int) -> list[Callable[[], Recording]]:
    """Sentences of drawn words, spoken by espeak-ng."""
    return [lambda t=t: Recording(speech.say(t), speech.RATE, t, t) for t in speech.sentences(n)]


def folder(path: Path) -> list[Callable[[], Recording]]:
    """The recordings that metadata.csv names, with their transcripts."""
    import soundfile

    table = path / "metadata.csv"
    if not table.is_file():
        raise UserError(f"no transcripts in {path}", got=" ".join(sorted(p.name for p in path.glob("*"))[:5]) or "nothing there",
                        needed=LAYOUT)  # fmt: skip
    with open(table, newline="", encoding="utf-8") as file:
        rows = csv.DictReader(file)
        needed = {"file_name", "transcription"}
        if not needed <= set(rows.fieldnames or ()):
            raise UserError(f"{table} lacks a column", got=", ".join(rows.fieldnames or ["no header"]), needed=LAYOUT)
        listed = [(row["file_name"], row["transcription"]) for row in rows]

    def read(name: str, text: str) -> Recording:
        try:
            wave, rate = soundfile.read(path / name, dtype="float32", always_2d=True)
        except (soundfile.LibsndfileError, OSError) as error:
            raise UserError(f"{path / name} cannot be read as audio", got=error, needed="wav, flac, ogg or mp3",
                            cause=f"line of {table.name} that names it") from None  # fmt: skip
        if rate < whisper.RATE:
            raise UserError(
                f"{path / name} has too low a rate", got=f"{rate:,} samples a second",
                needed=f"{whisper.RATE:,} or more: the teacher listens up to 8 kHz, half of which is not in this recording",
                next="record at 16 kHz; or resample it yourself, knowing that the upper bands stay empty",
            )  # fmt: skip
        return Recording(wave.mean(1), rate, text, name)

    return [lambda n=n, t=t: read(n, t) for n, t in listed]


def envelope(wave: np.ndarray) -> Tensor:
    """Log-energy (ceil(20 x seconds), CHANNELS) of a recording at 16 kHz in mel-spaced bands: what the student reads.

    Frame i is centred on i / 20 s, as the teacher's frame j is on j / 50 s.
    """
    hop, n = whisper.RATE // FPS, math.ceil(len(wave) * FPS / whisper.RATE)
    padded = torch.nn.functional.pad(torch.from_numpy(wave), (WINDOW // 2, WINDOW // 2 + n * hop - len(wave)))
    power = torch.fft.rfft(padded.unfold(0, WINDOW, hop)[:n] * torch.hann_window(WINDOW)).abs().square() / WINDOW
    mel = torch.linspace(*(1127 * math.log1p(f / 700) for f in (LOWEST, HIGHEST)), CHANNELS + 1)
    edges = (700 * torch.expm1(mel / 1127) * WINDOW / whisper.RATE).long()
    bands = [power[:, a:b].mean(1) for a, b in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)]
    return (torch.stack(bands, 1) + FLOOR).log()


# ------------------------------------------------------------------------------------------------------------------ making
def load(source: Source) -> Lessons:
    """The lessons of a source: from the cache, or made now and kept there."""
    key = {**asdict(source), "version": VERSION, "sensor": [FPS, CHANNELS, WINDOW, LOWEST, HIGHEST, FLOOR]}
    if source.path == "synthesised":
        key |= {"words": speech.SLOTS, "engine": version("espeakng-loader")}
    else:
        path = Path(source.path).absolute()
        key |= {
            "path": str(path),
            "files": sorted((p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in path.rglob("*")),
        }
    made = built("distill-lessons", key, lambda folder: _make(source, folder))
    tensors, rest = load_file(made / "lessons.safetensors"), json.loads((made / "lessons.json").read_text())
    return Lessons(**tensors, **rest)


def _make(source: Source, into: Path) -> None:
    """Every recording heard by the teacher; those it transcribes rightly from the canvas the student will fill are kept."""
    teacher = whisper.load(source.teacher, source.seconds)
    readers = synthesised(source.sentences) if source.path == "synthesised" else folder(Path(source.path))
    heard, left_out = _hear(readers, teacher)
    rest = _at_rest(heard, teacher)
    kept, wrote = [], []
    for start in range(0, len(heard), BATCH):
        batch = heard[start : start + BATCH]
        canvas = rest.repeat(len(batch), 1, 1)
        for row, one in zip(canvas, batch, strict=True):
            row[: len(one.features)] = one.features
        wrote += teacher.write(canvas.to(teacher.model.device))
    for one, text in zip(heard, wrote, strict=True):
        if whisper.normalise(text) == whisper.normalise(one.text):
            kept.append(one)
        else:
            left_out["misheard by the teacher"] += 1
    _check(len(kept), len(readers), left_out, source)
    envelopes = torch.zeros(len(kept), teacher.seconds * FPS, CHANNELS)
    for row, one in zip(envelopes, kept, strict=True):
        row[: len(one.envelope)] = one.envelope
    save_file({
        "envelopes": envelopes, "spans": torch.tensor([len(one.features) for one in kept]),
        "features": torch.cat([one.features.half() for one in kept]), "rest": rest,
        "held_out": torch.tensor([one.index % HELD_OUT == 0 for one in kept]),
    }, into / "lessons.safetensors")  # fmt: skip
    wer = whisper.word_error_rate([one.text for one in heard], wrote)
    reasons = ", ".join(f"{n} {why}" for why, n in left_out.items()) or "none left out"
    story = {"lessons": f"{len(kept)} of {len(readers)} recordings kept ({len(kept) / len(readers):.0%}): {reasons}",
             "teacher": f"{source.teacher}, word error rate {wer:.3f} on all that can be heard, 0 on what is kept"}  # fmt: skip
    (into / "lessons.json").write_text(json.dumps({"texts": [one.text for one in kept], "story": story}, indent=1))


@dataclass
class Heard:
    """A recording with what the teacher hears in it."""

    index: int
    text: str
    envelope: Tensor
    features: Tensor
    """(span, width)"""
    after: Tensor
    """(frames - span, width): the teacher's frames once the recording has ended."""


def _hear(readers: list[Callable[[], Recording]], teacher: whisper.Whisper) -> tuple[list[Heard], Counter]:
    """(what the teacher hears in each recording, how many teach nothing and why)."""
    heard, left_out = [], Counter()
    batch: list[tuple[int, str, np.ndarray]] = []

    def listen() -> None:
        for (i, text, wave), row in zip(batch, teacher.hear([wave for *_, wave in batch]).float().cpu(), strict=True):
            span = math.ceil(len(wave) * whisper.FRAMES_PER_SECOND / whisper.RATE)
            heard.append(Heard(i, text, envelope(wave), row[:span], row[span:]))
        batch.clear()

    for i, reader in enumerate(readers):
        one = reader()
        wave = (
            resample_poly(one.wave, whisper.RATE, one.rate).astype(np.float32) if one.rate != whisper.RATE else one.wave
        )
        if reason := unfit(wave, teacher.seconds):
            left_out[reason] += 1
            continue
        batch.append((i, one.text, wave))
        if len(batch) == BATCH:
            listen()
    if batch:
        listen()
    return heard, left_out


def _at_rest(heard: list[Heard], teacher: whisper.Whisper) -> Tensor:
    """(frames, width): the teacher's mean at each place of the canvas where a recording has ended; before the first end, the mean
    over all those places."""
    total, count = torch.zeros(teacher.frames, teacher.width), torch.zeros(teacher.frames, 1)
    for one in heard:
        total[len(one.features) :] += one.after
        count[len(one.features) :] += 1
    return torch.where(count > 0, total / count.clamp_min(1), total.sum(0) / count.sum().clamp_min(1))


def unfit(wave: np.ndarray, seconds: int) -> str:
    """Why a recording at 16 kHz teaches nothing; empty if it may."""
    if len(wave) < SHORTEST * whisper.RATE:
        return f"shorter than {SHORTEST:g} s"
    if len(wave) > seconds * whisper.RATE:
        return f"longer than {seconds} s"
    return "silent" if np.sqrt(np.mean(np.square(wave))) < QUIET else ""


def _check(kept: int, n: int, left_out: Counter, source: Source) -> None:
    if kept < 2 * HELD_OUT:
        raise UserError(
            "too few lessons are left", got=f"{kept} of {n}: " + (", ".join(f"{c} {why}" for why, c in left_out.items()) or "-"),
            needed=f"{2 * HELD_OUT} or more recordings of {SHORTEST:g} to {source.seconds} s that {source.teacher} hears right",
            cause="silent or clipped audio, transcripts of other recordings, another language, --data.seconds",
            next="listen to one, and compare it with its transcript",
        )  # fmt: skip
