"""Questions about composites, as text and as images: balanced by construction, every scene with its counterfactual.

Pair k is one scene twice (samples 2k and 2k + 1) that differ only in what question k % 4 asks about, so that no answer follows from the
question alone (Goyal 2017, "Making the V in VQA matter", calls them complementary pairs).
"""

from functools import cache

import torch
from numpy.random import Generator
from torch import Tensor
from trainworthy.recipes.shared.composites import COLOURS, SIDE, Item, generator, item, places, pool, render
from trainworthy.recipes.vlm.data.rows import Question

QUESTIONS = {"count": "how many digits ?", "colour": "left colour ?", "digit": "left digit ?", "red": "any red ?"}
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
NAMES = tuple(COLOURS)
RED, MOST = NAMES.index("red"), 3
COLUMN = 8  # pixels; no two digits of a scene share a column, so that "left" is unambiguous
WORDS = ("<pad>", "<bos>", "<eos>", ".", "?", "how", "many", "digits", "left", "colour", "digit", "any", "yes", "no",
         *NAMES, *NUMBERS)  # fmt: skip


def answers(items: list[Item]) -> tuple[str, ...]:
    """One answer for each of QUESTIONS; items are ordered from left to right."""
    red = any(one.colour == RED for one in items)
    return NUMBERS[len(items)], NAMES[items[0].colour], NUMBERS[items[0].digit], "yes" if red else "no"


def describe(items: list[Item]) -> str:
    """Return a scene in words, from left to right, column by column, the upper half first: `. . red seven . . blue two . .`"""
    words = ["."] * (2 * SIDE // COLUMN)
    for one in items:
        words[one.x // COLUMN * 2 + one.y * 2 // SIDE] = f"{NAMES[one.colour]} {NUMBERS[one.digit]}"
    return " ".join(words)


def draw(rng: Generator, split: str) -> tuple[list[Item], list[Item]]:
    """Return (shown, spare): one to three digits, and the rest of three. The leftmost is always shown. Its colour and class, the number of
    digits, and whether any is red are balanced."""
    first, *rest = sorted(places(rng, MOST, aside=COLUMN))
    n, left = int(rng.integers(1, MOST + 1)), int(rng.integers(len(NAMES)))
    colours = [left, *rng.integers(len(NAMES), size=2).tolist()]
    # then red occurs elsewhere in half of the scenes that have a place for it, so that half of all scenes have red
    if left != RED:
        others = [c for c in range(len(NAMES)) if c != RED]
        colours = [left, *rng.choice(others, 2).tolist()]
        if rng.random() < 0.5:
            colours[int(rng.integers(1, max(n, 2)))] = RED
    spots = [first, *[rest[i] for i in rng.permutation(2)]]
    items = [
        item(rng, split, p, digit=int(rng.integers(10)), colour=int(c)) for p, c in zip(spots, colours, strict=True)
    ]
    return items[:n], items[n:]


def change(rng: Generator, split: str, kind: int, items: list[Item], spare: list[Item]) -> list[Item]:
    """Return the same scene with another answer to question `kind`."""
    first, *rest = items
    if kind == 0:
        n = int(rng.choice([n for n in range(1, MOST + 1) if n != len(items)]))
        return [*items, *spare][:n]
    if kind == 1:
        return [first._replace(colour=_other(rng, first.colour, len(NAMES))), *rest]
    if kind == 2:
        digit = _other(rng, first.digit, 10)
        return [first._replace(digit=digit, tile=int(rng.choice(pool(split).of[digit]))), *rest]
    if any(one.colour == RED for one in items):
        return [one._replace(colour=_other(rng, RED, len(NAMES))) if one.colour == RED else one for one in items]
    i = int(rng.integers(len(items)))
    return [one._replace(colour=RED) if i == j else one for j, one in enumerate(items)]


def _other(rng: Generator, value: int, n: int) -> int:
    """Return a random one of `n` other than this one."""
    return (value + int(rng.integers(1, n))) % n


def by_x(items: list[Item]) -> list[Item]:
    return sorted(items, key=lambda one: one.x)


@cache
def pairs(split: str, n: int) -> list[tuple[list[Item], list[Item]]]:
    """Return the first `n` pairs of a split, items from left to right."""
    found = []
    for k in range(n):
        rng = generator(split, k)
        items, spare = draw(rng, split)
        found.append((by_x(items), by_x(change(rng, split, k % len(QUESTIONS), items, spare))))
    return found


class Scenes:
    """Images with four questions each; two images for every pair."""

    kinds = tuple(QUESTIONS)

    def __init__(self, split: str, n: int):
        self.split, self.pairs = split, pairs(split, n)

    def __len__(self) -> int:
        return 2 * len(self.pairs)

    def questions(self, index: int) -> list[Question]:
        """Return the questions about an image."""
        k, which = divmod(index, 2)
        pairs = zip(QUESTIONS.values(), answers(self.pairs[k][which]), strict=True)
        return [Question(i, q, a, k if i == k % len(QUESTIONS) else -1) for i, (q, a) in enumerate(pairs)]

    def size(self, index: int) -> tuple[int, int]:
        """Return (height, width) of an image."""
        return SIDE, SIDE

    def image(self, index: int) -> Tensor:
        """Return an image, (3, 64, 64) in 0-255; both of a pair have the same background."""
        k, which = divmod(index, 2)
        image = render(generator(self.split, k, "picture"), self.pairs[k][which], pool(self.split).tiles)
        return torch.from_numpy(image).permute(2, 0, 1)
