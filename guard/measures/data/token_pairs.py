"""Finds texts that have training's tokens in other pairs than training's texts have: they were encoded by another vocabulary."""

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from trainworthy.guard.measures.data.spaced import as_tensors, spaced

TEXTS, OTHERS = 4000, 1000  # that are read of training and of an evaluation
PAIRS = 1000  # neighbouring tokens that two sources must have to be compared
CAUSE = "this evaluation has another vocabulary or tokenizer than the training: build it once, from the training texts"


def pairs_of(texts: Iterable[list[int]]) -> Counter:
    """Count pairs of neighbouring tokens; of equal ones, as in padding, none."""
    return Counter(p for text in texts for p in pairwise(text) if p[0] != p[1])


def known(found: Counter, among: Any) -> int:
    """Return how many of the counted are also among others."""
    return sum(n for x, n in found.items() if x in among)


def foreign(trained: Counter, usual: float, other: Counter) -> str:
    """Return how an evaluation's pairs of tokens differ from training's; empty if they do not. `usual`: share of the pairs in new training
    texts that are known from those before."""
    tokens: Counter = Counter()
    for (a, _), n in other.items():
        tokens[a] += n
    got = known(other, trained) / max(1, other.total())
    same = known(tokens, {a for a, _ in trained}) / max(1, tokens.total())
    if other.total() < PAIRS or usual <= 0.5 or got >= 0.7 * usual or same <= 0.9:
        return ""
    return (
        f"{got:.0%} of the pairs of neighbouring tokens are known from training, {usual:.0%} of those in new training texts; {same:.0%} of "
        "the tokens are known"
    )


def check(train: Any, others: list[Any], limit: float) -> tuple[str, str] | None:
    """Compare the texts of two data sets. New texts of training are its last fifth: windows of one text overlap with those before. Samples of
    an evaluation may have rows that are no text (candidates of a recommender): the most familiar of them counts."""
    sides = spaced(train, TEXTS, limit, rows_of)
    place, count = (max(range(len(sides[0])), key=lambda i: len(sides[0][i])), len(sides[0])) if sides else (0, 0)
    rows = [side[place].tolist() for side in sides if len(side) == count]
    counted, fresh = pairs_of(rows[: len(rows) * 4 // 5]), pairs_of(rows[len(rows) * 4 // 5 :])
    if fresh.total() < PAIRS:
        return None
    usual = known(fresh, counted) / fresh.total()
    for data in others:
        theirs = spaced(data, OTHERS, limit, rows_of)
        alike = all(len(side) == count for side in theirs)
        places = [place] if alike else range(min(map(len, theirs), default=0))
        found = [foreign(counted, usual, pairs_of(side[i].tolist() for side in theirs)) for i in places]
        if found and all(found):
            return f"texts of the evaluation: {found[0]}", CAUSE
    return None


def rows_of(sample: Any) -> list[Tensor] | None:
    """Return the rows of whole numbers of a sample; None if it has none."""
    rows = [x for x in as_tensors(sample) if x.dim() == 1 and x.dtype in (torch.int64, torch.int32) and len(x) > 1]
    return rows or None
