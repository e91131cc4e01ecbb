"""Whether samples are in both splits because short samples repeat by themselves."""

import math

REPEATED = 0.05  # share of a validation set that may also be in training, where short texts repeat by chance
REPEATED_SHORT = 0.5  # the same, where the copies are the shortest samples
SHORTEST = 0.67  # median length of the copies over that of the other samples
FEWEST = 5  # expected copies
WHOLE = 0.95  # share of a validation set that a split of repeated samples hardly reaches
ALIKE = 0.15
"""Share of a validation set that may be near training texts, where training texts are as near to each other."""


def repeat_naturally(found: dict) -> tuple[bool, str]:
    """Return whether short texts are in both splits as often as a random split of data that repeat by themselves has them, and a remark.
    More may be if the copies are the shortest samples: what was duplicated before the split has samples of all lengths."""
    if "expected" not in found:
        return False, ""
    n, expected = found["compared"]["exact"][0], found["expected"]
    remark = f"; short samples repeat in training, too: {expected:g} copies are expected by chance"
    copies, others = found.get("lengths") or (1.0, 1.0)
    if shortest := copies <= SHORTEST * others:
        remark += f", and the copies are the shortest samples (median length {copies:g}, of the others {others:g})"
    return _by_chance(found["exact"], expected, (REPEATED_SHORT if shortest else REPEATED) * n), remark


def repeated_before(found: dict) -> str:
    """Return the cause of exact copies if training samples repeat so often that a random split of them has as many; else empty."""
    n, expected = found["compared"]["exact"][0], found["by_repeats"]
    if expected < FEWEST or found["exact"] > WHOLE * n or abs(found["exact"] - expected) > 3 * math.sqrt(expected):
        return ""
    return (f"samples were repeated before the split (a rare class oversampled, a file read twice): {expected / n:.0%} of the training samples "
            "have a copy in training, too. Split first, then repeat training samples")  # fmt: skip


def alike_naturally(text: dict, near: int, n: int) -> tuple[bool, str]:
    """Return whether texts of one split are as near to those of the other as training texts are to each other, and a remark."""
    if "expected_near" not in text:
        return False, ""
    expected = text["expected_near"]
    remark = f"; training texts are similar to each other, too: {expected:g} near ones are expected of a random split"
    return _by_chance(near, expected, ALIKE * n), remark


def _by_chance(count: int, expected: float, most: float) -> bool:
    """Return whether a count is within three standard errors of the expected one, and at most `most`."""
    return count <= min(most, expected + 3 * math.sqrt(expected))
