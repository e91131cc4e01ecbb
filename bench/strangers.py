"""What an exported student of distill/whisper makes of speech that nobody trained on: another speed, another voice, other words.

    python bench/strangers.py runs/distill-whisper/2026.../export [EXPORT ...]
    python bench/strangers.py EXPORT --recordings FOLDER        # and of recordings with a metadata.csv, each for itself

Beside it the teacher, which hears the sound itself on the same canvas. The export is read without the recipe. One voice of
espeak-ng is what the student learnt from (en-us, 120 words a minute).
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from trainworthy.recipes.distill.data import arrays, recordings  # noqa: E402
from trainworthy.recipes.shared import speech, whisper  # noqa: E402

N, SECONDS = 24, 6
NEVER_SAID = (
    "The children played in the park until dark.", "We need more bread and milk for breakfast.",
    "She wrote a long letter to her friend.", "The train was late again this evening.",
    "He bought a new pair of shoes yesterday.", "The weather will be cold and windy tomorrow.",
    "They walked along the beach for an hour.", "Please close the door when you leave.",
    "The doctor told him to rest for a week.", "I have never been to that city before.",
    "The cat slept on the chair all day.", "Our teacher gave us a difficult question.",
    "The bridge was built a hundred years ago.", "You should drink more water every day.",
    "The film begins at eight o'clock tonight.", "My father works in a large hospital.",
)  # fmt: skip


def spoken(texts: list[str], **how: str | int) -> list[np.ndarray]:
    """The sentences said by espeak-ng, at 16 kHz."""
    return [recordings.Recording(speech.say(t, **how), speech.RATE, t, 0).at_16k() for t in texts]


def written(program, teacher: whisper.Whisper, waves: list[np.ndarray]) -> list[str]:
    """What the teacher's decoder reads from the student's features."""
    envelopes = torch.zeros(len(waves), SECONDS * recordings.FPS, recordings.CHANNELS)
    for row, wave in zip(envelopes, waves, strict=True):
        heard = recordings.envelope(wave)
        row[: len(heard)] = heard
    return teacher.write(program(envelopes))


def recorded(folder: Path) -> tuple[list[str], list[np.ndarray]]:
    """The transcripts and sounds of a folder that fit the canvas."""
    rows = arrays.rows(
        folder, arrays.table(folder / "metadata.csv", recordings.LAYOUT), rate=recordings.FPS, teacher=None
    )
    pairs = [(row.text, recordings.sound(row).at_16k()) for row in rows]
    fit = [(text, wave) for text, wave in pairs if not recordings.unfit(wave, SECONDS)]
    return [text for text, _ in fit], [wave for _, wave in fit]


def main() -> None:
    """A line for each kind of speech: word error rates of the teacher and of each student, and the first sentence of the last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("exports", nargs="+", type=Path)
    parser.add_argument("--recordings", type=Path)
    args = parser.parse_args()
    programs = [torch.export.load(path / "model.pt2").module() for path in args.exports]
    teacher = whisper.load(json.loads((args.exports[0] / "config.json").read_text())["teacher"], SECONDS)
    held_out = [t for i, t in enumerate(speech.sentences(440)) if i % recordings.HELD_OUT == 0][:N]
    kinds = {
        "held out, as learnt from": (held_out, spoken(held_out)),
        "at 160 words a minute": (held_out, spoken(held_out, words_per_minute=160)),
        "at 90 words a minute": (held_out, spoken(held_out, words_per_minute=90)),
        "another voice (en-us+f3)": (held_out, spoken(held_out, voice="en-us+f3")),
        "another accent (en-gb-x-rp)": (held_out, spoken(held_out, voice="en-gb-x-rp")),
        "words never seen": ([*NEVER_SAID], spoken([*NEVER_SAID])),
    }
    if args.recordings:
        kinds["recordings"] = recorded(args.recordings)
    with torch.no_grad():
        for kind, (texts, waves) in kinds.items():
            waves = [wave[: SECONDS * whisper.RATE] for wave in waves]
            wer = {"teacher": whisper.word_error_rate(texts, teacher.write(teacher.hear(waves)))}
            for path, program in zip(args.exports, programs, strict=True):
                said = written(program, teacher, waves)
                wer[path.parent.name] = whisper.word_error_rate(texts, said)
            rates = ", ".join(f"{name} {rate:.1%}" for name, rate in wer.items())
            print(f"{kind:<27} {len(texts):>2} sentences: {rates}; '{texts[0]}' becomes '{said[0]}'", flush=True)


if __name__ == "__main__":
    main()
