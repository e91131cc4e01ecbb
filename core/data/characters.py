"""Finds kinds of characters that validation texts have and training texts never have: one split was cleaned in another way."""

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


def faults(scans: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (fault, cause) of the text fields of the splits `train` and `val` (inventory.Scan)."""
    for key in (scans["train"].texts.keys() & scans["val"].texts.keys()) if {"train", "val"} <= scans.keys() else ():
        train, val = scans["train"].texts[key], scans["val"].texts[key]
        if (found := unknown(train, val)) is not None:
            kind, share = found
            yield (f"{share:.0%} of the validation texts of '{key}' contain {kind}, and none of {len(train):,} training texts",
                   f"training texts were cleaned in another way than validation texts: they never contain {kind}")  # fmt: skip
