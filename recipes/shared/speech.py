"""Speech synthesised by espeak-ng (package espeakng-loader) from sentences with randomly drawn words.

The words are those of a twice as long list that Whisper tiny.en recognised in at least ten of twelve sentences (voice
en-us, 120 words a minute, 2026-11-21). It recognised 40% of the sentences from the whole list, and 86% from these
words.
"""

import ctypes
import itertools
import random
from functools import cache

import numpy as np
from trainworthy.core.base.errors import UserError

RATE = 22_050
"""Samples per second of espeak-ng."""
RETRIEVAL, CHARS_UTF8, WORDS_PER_MINUTE = 1, 1, 1  # AUDIO_OUTPUT_RETRIEVAL, espeakCHARS_UTF8, espeakRATE of speak_lib.h

SUBJECTS = ("the young boy", "the president", "the old woman", "the manager", "the king", "the farmer", "the driver", "our coach",
            "my uncle", "my sister", "my cousin", "my brother")  # fmt: skip
VERBS = ("sold", "showed", "painted", "moved", "lost", "found", "carried", "brought", "wanted", "opened", "needed",
         "saw")  # fmt: skip
OBJECTS = ("the red car", "a small table", "an old clock", "the computer", "the telephone", "the black jacket", "the money",
           "the machine", "the coffee", "a big house", "the piano", "the guitar")  # fmt: skip
TAILS = ("near the river", "near the station", "in the office", "in the garden", "in the afternoon", "in September", "last summer",
         "every winter", "behind the school", "after lunch", "this morning", "on Monday")  # fmt: skip
SLOTS = (SUBJECTS, VERBS, OBJECTS, TAILS)
MOST = len(TAILS) ** (len(SLOTS) - 1)  # sentences of which no two share three parts


def sentences(n: int, seed: int = 0) -> list[str]:
    """Return `n` sentences such as `My brother saw the red car in the garden.` Every word is about equally frequent. No
    two sentences share three of their four parts, so that one does not reveal another."""
    parts = range(len(TAILS))
    places = list(itertools.product(parts, repeat=len(SLOTS) - 1))
    if n > len(places):
        raise UserError("there are not so many sentences", got=f"{n:,}", needed=f"at most {len(places):,}",
                        next="--data.path FOLDER for recordings of your own")  # fmt: skip
    chosen = random.Random(seed).sample(places, n)
    words = ([slot[i] for slot, i in zip(SLOTS, (*place, sum(place) % len(parts)), strict=True)] for place in chosen)
    return [" ".join(text)[0].upper() + " ".join(text)[1:] + "." for text in words]


@cache
def _engine() -> ctypes.CDLL:
    """Return espeak-ng, initialised once per process."""
    try:
        import espeakng_loader

        lib = ctypes.CDLL(espeakng_loader.get_library_path())
        rate = lib.espeak_Initialize(RETRIEVAL, 0, espeakng_loader.get_data_path().encode(), 0)
    except (ImportError, OSError) as error:
        raise UserError(
            "no speech can be made on this machine", got=f"{type(error).__name__}: {error}",
            needed="espeak-ng, as the package espeakng-loader brings it (Linux, macOS and Windows on x86-64 or arm64)",
            next="pip install 'trainworthy[distill]', or give recordings of your own: --data.path FOLDER",
        ) from None  # fmt: skip
    if rate != RATE:
        raise UserError("espeak-ng does not start", got=f"espeak_Initialize returned {rate}", needed=f"{RATE} samples a second",
                        cause="its data folder is missing or of another version",
                        next="pip install --force-reinstall espeakng-loader, or --data.path FOLDER")  # fmt: skip
    return lib


def say(text: str, *, voice: str = "en-us", words_per_minute: int = 120) -> np.ndarray:
    """Speak `text`: (samples,) float32 in [-1, 1] at `RATE`. Pitch and pace vary from call to call, as in a voice. The
    same sentences in the same order from the start of a process give the same samples; a single one does not."""
    lib, parts = _engine(), []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)
    def take(samples, n, _events) -> int:
        if n > 0:
            parts.append(np.ctypeslib.as_array(samples, (n,)).copy())
        return 0  # continue

    lib.espeak_SetSynthCallback(take)
    if lib.espeak_SetVoiceByName(voice.encode()):
        raise UserError(f"espeak-ng has no voice '{voice}'", needed="a name such as en-us, en-gb-x-rp, en-us+f3")
    lib.espeak_SetParameter(WORDS_PER_MINUTE, words_per_minute, 0)
    data = text.encode() + b"\0"
    lib.espeak_Synth(data, len(data), 0, 0, 0, CHARS_UTF8, None, None)
    lib.espeak_Synchronize()
    return np.concatenate(parts).astype(np.float32) / 32768 if parts else np.zeros(0, np.float32)
