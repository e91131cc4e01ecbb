"""Finds kinds of characters that validation texts have and training texts never have: one split was cleaned in another way. And texts whose
letters are bytes of UTF-8 that were read in another encoding."""

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

KINDS = {
    "a line break": re.compile(r"\n"),
    "two spaces in a row or a tab": re.compile(r"  |\t"),
    "a capital letter": re.compile(r"[A-Z]"),
    "punctuation": re.compile(r"[.,;:!?]"),
}
"""Of the format alone. Other letters or digits may be missing because validation is of another source on purpose."""
SHARE = 0.25  # of the validation texts
BEYOND = re.compile(r"[^\x00-\x7f]+")
MISREAD = 0.5  # of the texts with letters beyond ASCII; a capital before a closing quote may be two bytes by chance
LEAST, EXPECTED = 20, 20  # validation texts with the kind; training texts that would have it at the same share


def unknown(train: list[str], val: list[str]) -> tuple[str, float] | None:
    """Return (kind, share of `val` that has it) of the most frequent kind that no text of `train` has, or None."""
    found = {}
    for kind, pattern in KINDS.items():
        n = sum(pattern.search(text) is not None for text in val)
        share = n / max(1, len(val))
        if n >= LEAST and share >= SHARE and share * len(train) >= EXPECTED and not any(map(pattern.search, train)):
            found[kind] = share
    return max(found.items(), key=lambda one: one[1], default=None)


def misread(texts: list[str]) -> tuple[int, int, str]:
    """Return how many texts hold letters that are the bytes of others (UTF-8 read as Latin-1 or cp1252), of how many with letters beyond ASCII,
    and one of them as it should be."""
    wrong, beyond, example = 0, 0, ""
    for text in texts:
        runs = BEYOND.findall(text)
        meant = next((m for run in runs if (m := _decoded(run))), "")
        wrong, beyond, example = wrong + bool(meant), beyond + bool(runs), example or meant
    return wrong, beyond, example


def _decoded(run: str) -> str:
    """Return what the bytes of these letters are in UTF-8, or nothing. Windows-1252 has no letter for five bytes: they stay controls."""
    with contextlib.suppress(UnicodeError):
        return b"".join(c.encode("latin-1" if ord(c) < 256 else "cp1252") for c in run).decode("utf-8")
    return ""


def faults(scans: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (fault, cause) of the text fields of the splits `train` and `val` (inventory.Scan)."""
    for key in (scans["train"].texts.keys() & scans["val"].texts.keys()) if {"train", "val"} <= scans.keys() else ():
        train, val = scans["train"].texts[key], scans["val"].texts[key]
        if (found := unknown(train, val)) is not None:
            kind, share = found
            yield (f"{share:.0%} of the validation texts of '{key}' contain {kind}, and none of {len(train):,} training texts",
                   f"training texts were cleaned in another way than validation texts: they never contain {kind}")  # fmt: skip
    for split, scan in scans.items():
        for key, texts in scan.texts.items():
            wrong, beyond, example = misread(texts)
            if wrong >= LEAST and wrong >= MISREAD * beyond:
                yield (f"{wrong:,} of {beyond:,} texts of '{key}' in {split} with letters beyond ASCII hold bytes of UTF-8 as letters, for example "
                       f"for {example[:20]!r}",
                       "a file in UTF-8 was read as Latin-1 or Windows-1252, and written again: read it with encoding='utf-8'")  # fmt: skip
