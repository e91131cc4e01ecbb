"""Finds a single mark (a full stop, a quote, a space) that tells preferred answers from the others, whatever they say."""

from collections import Counter
from collections.abc import Iterable

# Share of the pairs whose answers must differ in the mark, and of those the share in which the same side has more
OFTEN, AGREED = (2 / 3, 0.95)
FEWEST = 50  # pairs


def marks(text: str) -> Counter[str]:
    """Return how often each character that is neither a letter nor a digit occurs."""
    return Counter(c for c in text if not c.isalnum())


def given_away(pairs: Iterable[tuple[str, str]]) -> tuple[str, str, int, int] | None:
    """Return (the side, the mark, pairs in which this side has more of it, pairs in which the answers differ in it) of a mark that most of
    `pairs` (chosen, rejected) differ in, nearly always in favour of one side. None if there is none."""
    more: dict[str, Counter[str]] = {"chosen": Counter(), "rejected": Counter()}
    n = 0
    for chosen, rejected in pairs:
        a, b, n = marks(chosen), marks(rejected), n + 1
        more["chosen"].update(set(a - b))
        more["rejected"].update(set(b - a))
    for side, other in (("chosen", "rejected"), ("rejected", "chosen")):
        for mark, count in more[side].most_common():
            differ = count + more[other][mark]
            if n >= FEWEST and differ >= OFTEN * n and count >= AGREED * differ:
                return side, mark, count, differ
    return None
