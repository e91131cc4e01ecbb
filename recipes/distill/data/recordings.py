"""Training data of the student: recordings as a low-cost sensor gives them, with the teacher's features of the same sound.

A recording is kept only if it is audible and the teacher transcribes it correctly; otherwise the student would learn misheard words.
The set is made once and cached.
"""

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from scipy.signal import resample_poly
from torch import Tensor
from trainworthy.core.base.errors import UserError
from trainworthy.core.data.assets import built
from trainworthy.core.data.loader import ahead
from trainworthy.core.data.validation_split import absolute
from trainworthy.recipes.distill.data import arrays
from trainworthy.recipes.shared import speech, whisper

VERSION = 2  # version of the cached files: another number makes them again for everybody
# The sensor: frames per second, bands, samples of each window (100 ms, half overlapping).
FPS, CHANNELS, WINDOW = 20, 16, 1600
LOWEST, HIGHEST = 80.0, 7_000.0  # Hz, ends of the bands, evenly spaced in mel
FLOOR = 1e-6  # energy below the sensor's resolution
SHORTEST, QUIET = 0.3, 1e-3  # seconds; root mean square (full scale: 1) below which nothing is said
CLIPPED = 0.01  # share of samples at full scale from which a recording is clipped
HELD_OUT, BATCH = 5, 16  # every fifth recording is held out; recordings per batch of the teacher
FEWEST_TESTED = 40  # smallest synthesised test set in sentences; with fewer there is none
RESTED = 448  # recordings from which the teacher's features after the end of speech are averaged
FEATURES = "features/{:07d}.npy"
LAYOUT = "metadata.csv with the columns file_name and transcription (the hub's audiofolder layout)"


@dataclass
class Source:
    """Recordings and their teacher."""

    path: str = "synthesised"
    """`synthesised`, or a folder with recordings (wav, flac, ogg, mp3) and a metadata.csv: file_name, transcription; for a sensor
    of your own also array, rate, frames (see docs/recipes/distill-whisper.md)."""
    sentences: int = 440
    """Sentences to synthesise; the teacher mishears about one in seven, which are left out."""
    teacher: str = "tiny.en"
    """The packaged `tiny.en` or `base`, or the hub name or folder of a Whisper (openai/whisper-base.en); a multilingual one transcribes
    English."""
    seconds: int = 6
    """Window in seconds; longer recordings are left out. Whisper's own is 30, and costs five times as much."""
    max_bad: float = 0.01
    """Largest share of recordings that cannot be read, or of arrays that are missing, broken, not finite or of another length. They are
    left out, counted and named; a larger share is an error."""

    def __post_init__(self):
        self.path = absolute(self.path, "synthesised")


@dataclass
class Recordings:
    """The student's inputs, in the order of the recordings: in memory, or your own arrays in their files."""

    spans: Tensor
    """Frames of the teacher until a recording's end, (N,)."""
    rest: Tensor
    """Mean of the teacher's frames at each position after the end of a recording, (frames, width)."""
    held_out: Tensor
    """Which recordings are held out, (N,) bool."""
    texts: list[str]
    story: dict[str, str]
    """What was left out and why, for the data report."""
    length: int
    """Rows of an envelope: 20 x seconds."""
    folder: Path
    envelopes: Tensor | None = None
    """Log-energies, zero after the end, (N, length, CHANNELS)."""
    features: Tensor | None = None
    """The teacher's frames, one recording after the other, (sum of spans, width) fp16."""
    arrays: list[str] | None = None
    """Or the file of each array; then `folder` has a file of the teacher's frames for each."""
    mean: Tensor | None = None
    """Mean of the teacher at each position over the speech of the training recordings, (frames, width); after the last speech, its mean at
    rest."""
    std: Tensor | None = None
    """Standard deviation around it, (width,)."""
    ears_mean: Tensor | None = None
    """Mean of the frames of the training envelopes, (channels,), and their standard deviation."""
    ears_std: Tensor | None = None

    def __post_init__(self):
        self.starts = (self.spans.cumsum(0) - self.spans).tolist()

    def read(self, index: int) -> tuple[Tensor, Tensor]:
        """Return (envelope (length, channels), teacher's features (span, width)) of one recording, fp32."""
        if self.arrays is None:
            start = self.starts[index]
            return self.envelopes[index], self.features[start : start + int(self.spans[index])].float()
        heard = torch.from_numpy(np.load(self.folder / FEATURES.format(index))).float()
        return arrays.padded(Path(self.arrays[index]), self.length), heard

    @property
    def sensor(self) -> str:
        """What an envelope contains."""
        return "log-energies" if self.arrays is None else "the sensor's numbers"

    def describe(self) -> None:
        """Compute mean and deviation of both sides over the training recordings, in two passes."""
        which = (~self.held_out).nonzero()[:, 0].tolist()
        threads = 1 if self.arrays is None else arrays.THREADS
        total = torch.zeros_like(self.rest)
        count = torch.zeros(len(self.rest), 1)
        square = torch.zeros(self.rest.shape[1])
        frames, sums = 0, torch.zeros(3, 1, dtype=torch.double)
        for envelope, heard in ahead(self.read, which, threads=threads, window=arrays.WINDOW):
            total[: len(heard)] += heard
            count[: len(heard)] += 1
            rows = envelope[envelope.any(-1)].double()
            frames += len(rows)
            sums = sums + torch.stack([rows.sum(0), rows.square().sum(0), rows.abs().amax(0)])
        self.mean = torch.where(count > 0, total / count.clamp_min(1), self.rest)
        for _, heard in ahead(self.read, which, threads=threads, window=arrays.WINDOW):
            square += (heard - self.mean[: len(heard)]).square().sum(0)
        self.std = (square / count.sum()).sqrt()
        mean = sums[0] / frames
        spread = ((sums[1] - frames * mean.square()) / (frames - 1)).clamp_min(0).sqrt()
        # A constant channel (a black border) is divided by one, not by rounding error.
        self.ears_mean, self.ears_std = mean.float(), torch.where(spread > 1e-6 * sums[2], spread, 1.0).float()


# -------------------------------------------------------------------------------------------------------------- recordings
class Unreadable(UserError):
    """A file that is no sound."""

    def __init__(self, row: arrays.Row, error: Exception):
        super().__init__(f"{row.audio} cannot be read as audio", got=error, needed="wav, flac, ogg or mp3",
                         cause=f"line {row.line} of metadata.csv names it")  # fmt: skip
        self.name = f"{row.audio.name}, line {row.line}"


@dataclass
class Recording:
    wave: np.ndarray
    """Return the samples (n,) float32 at `rate`."""
    rate: int
    text: str
    group: int
    """Recordings of one group go to one split."""
    array: Path | None = None
    """Frames of your own sensor; without them, energies are computed from the wave."""

    def at_16k(self) -> np.ndarray:
        """Return the wave at the teacher's rate."""
        same = self.rate == whisper.RATE
        return self.wave if same else resample_poly(self.wave, whisper.RATE, self.rate).astype(np.float32)


def synthesised(n: int) -> list[Callable[[], Recording]]:
    """Sentences of random words, spoken by espeak-ng."""
    return [lambda i=i, t=t: Recording(speech.say(t), speech.RATE, t, i) for i, t in enumerate(speech.sentences(n))]


def folder(source: Source, teacher: whisper.Whisper) -> tuple[list[Callable[[], Recording]], dict[str, str]]:
    """Return (the recordings in metadata.csv with their transcripts and, if it has them, arrays; notes)."""
    root = Path(source.path)
    found, notes = arrays.rows(root, arrays.table(root / "metadata.csv", LAYOUT), rate=FPS, teacher=teacher), {}
    found, excluded = arrays.allowed(root, found, held_out=HELD_OUT)
    if excluded:
        notes["excluded"] = f"{excluded} that validation asks about"
    if found and found[0].array is not None:
        found, notes["arrays left out"] = arrays.survey(found, rate=FPS, max_bad=source.max_bad)
    return [lambda row=row: sound(row) for row in found], notes


def sound(row: arrays.Row) -> Recording:
    """Return the recording of a line of metadata.csv."""
    import soundfile

    try:
        wave, rate = soundfile.read(row.audio, dtype="float32", always_2d=True)
    except (soundfile.LibsndfileError, OSError) as error:
        raise Unreadable(row, error) from None
    if rate < whisper.RATE:
        raise UserError(
            f"{row.audio} has too low a rate", got=f"{rate:,} samples a second",
            needed=f"{whisper.RATE:,} or more: the teacher listens up to 8 kHz, half of which is not in this recording",
            next="record at 16 kHz; or resample it yourself, knowing that the upper bands stay empty",
        )  # fmt: skip
    return Recording(wave.mean(1), rate, row.text, row.group, row.array)


def envelope(wave: np.ndarray) -> Tensor:
    """Return the student's input: log-energies (ceil(20 x seconds), CHANNELS) of a recording at 16 kHz in mel-spaced bands.

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
def test_source(source: Any) -> tuple[Any, int] | None:
    """Return (source of the test recordings, sentences to skip there), or None. No setting is chosen by them: as many further sentences as
    there are validation sentences, or the folder `test` with its own metadata.csv."""
    if source.path != "synthesised":
        inside = Path(source.path) / "test"
        return (replace(source, path=str(inside)), 0) if (inside / "metadata.csv").is_file() else None
    n = source.sentences
    more = min(n // HELD_OUT, speech.MOST - n)
    return (replace(source, sentences=n + more), n) if more >= FEWEST_TESTED else None


def load(source: Source, skip: int = 0) -> Recordings:
    """Return the kept recordings of a source, without its first `skip` sentences. They are made on first use, then cached."""
    key = {**asdict(source), "version": VERSION, "sensor": [FPS, CHANNELS, WINDOW, LOWEST, HIGHEST, FLOOR]}
    key |= {"skip": skip} if skip else {}
    if source.path == "synthesised":
        key |= {"words": speech.SLOTS, "engine": version("espeakng-loader")}
    else:
        path = Path(source.path).absolute()
        files = sorted((str(p.relative_to(path)), p.stat().st_size, p.stat().st_mtime_ns) for p in path.rglob("*"))
        key |= {"path": str(path), "files": files, "clipped": CLIPPED}
    return _read(built("distill-lessons", key, lambda folder: _make(source, folder, skip)))


@lru_cache(maxsize=2)  # the test split's, too: gates build a stage many times, and hold several
def _read(made: Path) -> Recordings:
    return Recordings(
        folder=made, **load_file(made / "lessons.safetensors"), **json.loads((made / "lessons.json").read_text())
    )


def _make(source: Source, into: Path, skip: int) -> None:
    """Run the teacher on every recording, and keep those that it transcribes correctly from the student's window. Memory is bounded, except
    for the kept recordings themselves if they have no arrays."""
    teacher, notes = whisper.load(source.teacher, source.seconds), {}
    if source.path == "synthesised":
        readers = synthesised(source.sentences)[skip:]
    else:
        readers, notes = folder(source, teacher)
    left_out, kept, spoken, wrote = Counter(), [], [], []
    batches = _hear(readers, teacher, left_out, source.max_bad)
    first = list(itertools.islice(batches, RESTED // BATCH))
    rest = _at_rest([one for batch in first for one in batch], teacher)
    (into / FEATURES).parent.mkdir()
    for batch in itertools.chain(first, batches):
        canvas = rest.repeat(len(batch), 1, 1)
        for row, one in zip(canvas, batch, strict=True):
            row[: len(one.features)] = one.features
        for one, text in zip(batch, teacher.write(canvas.to(teacher.model.device)), strict=True):
            spoken.append(one.text)
            wrote.append(text)
            if whisper.normalise(text) == whisper.normalise(one.text):
                kept.append(_kept(one, into / FEATURES.format(len(kept))))
            else:
                left_out["misheard by the teacher"] += 1
    _check(len(kept), len(readers), left_out, source)
    wer = whisper.word_error_rate(spoken, wrote)
    reasons = ", ".join(f"{n} {why}" for why, n in left_out.items()) or "none left out"
    story = {**notes, "lessons": f"{len(kept)} of {len(readers)} recordings kept ({len(kept) / len(readers):.0%}): {reasons}",
             "teacher": f"{source.teacher}, word error rate {wer:.3f} on all that can be heard, 0 on what is kept"}  # fmt: skip
    _write(kept, rest, story, into, teacher.seconds * FPS)


def _kept(one: "Heard", file: Path) -> "Heard":
    """Return what stays in memory of a recording: half precision, nothing after its end; with an array, the teacher's frames go to a file."""
    span, half = len(one.features), one.features.half()
    if one.array is not None:
        np.save(file, half.numpy())
    return replace(one, features=half if one.array is None else half[:0], after=half[:0], span=span)


def _write(kept: list["Heard"], rest: Tensor, story: dict[str, str], into: Path, length: int) -> None:
    """Write lessons.safetensors and lessons.json: the fields of `Recordings`."""
    own = {"arrays": [str(one.array) for one in kept]} if kept[0].array is not None else {}
    words = {"texts": [one.text for one in kept], "story": story, "length": length, **own}
    tensors = {"spans": torch.tensor([one.span for one in kept]), "rest": rest,
               "held_out": torch.tensor([one.group % HELD_OUT == 0 for one in kept])}  # fmt: skip
    if not own:
        tensors["envelopes"] = torch.zeros(len(kept), length, CHANNELS)
        for row, one in zip(tensors["envelopes"], kept, strict=True):
            row[: len(one.envelope)] = one.envelope
        tensors["features"] = torch.cat([one.features for one in kept])
    found = Recordings(folder=into, **tensors, **words)
    found.describe()
    tensors |= {name: getattr(found, name) for name in ("mean", "std", "ears_mean", "ears_std")}
    save_file(tensors, into / "lessons.safetensors")
    (into / "lessons.json").write_text(json.dumps(words, indent=1))


@dataclass
class Heard:
    """A recording with the teacher's features."""

    group: int
    text: str
    envelope: Tensor | None
    """None if the sensor has an array."""
    features: Tensor
    """(span, width)"""
    after: Tensor
    """The teacher's frames after the end of the recording, (frames - span, width)."""
    array: Path | None = None
    span: int = 0


def _hear(
    readers: list[Callable[[], Recording]], teacher: whisper.Whisper, left_out: Counter, max_bad: float
) -> Iterator[list[Heard]]:
    """Yield the teacher's features of the recordings, a batch at a time; `left_out` gets the reasons and counts of the others."""
    batch: list[tuple[Recording, np.ndarray]] = []

    def listen() -> list[Heard]:
        found = []
        for (one, wave), row in zip(batch, teacher.hear([wave for _, wave in batch]).float().cpu(), strict=True):
            span = math.ceil(len(wave) * whisper.FRAMES_PER_SECOND / whisper.RATE)
            energies = envelope(wave) if one.array is None else None
            found.append(Heard(one.group, one.text, energies, row[:span], row[span:], one.array))
        batch.clear()
        return found

    for _, one in readable(readers, left_out, max_bad):
        wave = one.at_16k()
        if reason := unfit(wave, teacher.seconds):
            left_out[reason] += 1
            continue
        batch.append((one, wave))
        if len(batch) == BATCH:
            yield listen()
    if batch:
        yield listen()


def readable(
    readers: list[Callable[[], Recording]], left_out: Counter, max_bad: float
) -> Iterator[tuple[int, Recording]]:
    """Yield (index, recording) of those whose file is sound; `left_out` gets the others by name. Raises UserError once they are more than
    the share `max_bad`."""
    broken: list[Unreadable] = []
    for i, reader in enumerate(readers):
        try:
            one = reader()
        except Unreadable as fault:
            broken.append(fault)
            if len(broken) > max_bad * len(readers):
                raise UserError(
                    "\n".join(map(str, broken[-arrays.NAMED :])), needed=f"at most {max_bad:.1%} of {len(readers):,} recordings (--data.max-bad)",
                    next="correct these files, or remove their lines",
                ) from None  # fmt: skip
            left_out[f"cannot be read ({fault.name})"] += 1
        else:
            yield i, one


def _at_rest(heard: list[Heard], teacher: whisper.Whisper) -> Tensor:
    """Return the teacher's mean at each position after the end of a recording, (frames, width); before the earliest end, the mean over all
    those positions."""
    total, count = torch.zeros(teacher.frames, teacher.width), torch.zeros(teacher.frames, 1)
    for one in heard:
        total[len(one.features) :] += one.after
        count[len(one.features) :] += 1
    return torch.where(count > 0, total / count.clamp_min(1), total.sum(0) / count.sum().clamp_min(1))


def unfit(wave: np.ndarray, seconds: int) -> str:
    """Return why a recording at 16 kHz is left out, or ""."""
    if len(wave) < SHORTEST * whisper.RATE:
        return f"shorter than {SHORTEST:g} s"
    if len(wave) > seconds * whisper.RATE:
        return f"longer than {seconds} s"
    if not np.isfinite(wave).all():
        return "not finite"
    if np.mean(np.abs(wave) >= 0.999) > CLIPPED:
        return "clipped"
    return "silent" if np.sqrt(np.mean(np.square(wave))) < QUIET else ""


def _check(kept: int, n: int, left_out: Counter, source: Source) -> None:
    if kept < 2 * HELD_OUT:
        raise UserError(
            "too few recordings are left", got=f"{kept} of {n}: " + (", ".join(f"{c} {why}" for why, c in left_out.items()) or "-"),
            needed=f"{2 * HELD_OUT} or more recordings of {SHORTEST:g} to {source.seconds} s that {source.teacher} hears right",
            cause="silent or clipped audio, transcripts of other recordings, another language, --data.seconds",
            next="listen to one, and compare it with its transcript",
        )  # fmt: skip
