"""Samples whose names say that they belong together: frames of a video, tiles of a slide, shots of one object."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

FEWEST = 20  # validation samples with relatives in training, below which nothing is concluded
RARE = 0.05  # largest mean share of the training samples that are a sample's relatives: names like IMG_0001 say nothing
NEAREST = 0.5  # share of samples whose nearest training sample is a relative, from which series were torn apart


def series_of(name: str) -> str:
    """Return a file's name without its counter at the end (`video12_007.png` -> `video12`), with its folder. What some tools append to
    the copies of one picture (`.rf.` and a hash) is dropped, and the picture is the series."""
    path = PurePath(name)
    of, copied, _ = path.name.partition(".rf.")
    return str(path.parent / (of if copied else re.sub(r"[\s_.(-]*\d+\)?$", "", path.stem)))


def torn(val: Sequence[str], train: Sequence[str], nearest: Sequence[int]) -> dict[str, Any] | None:
    """Return how many validation samples have a relative as their nearest training sample, if their names form series that lie in both
    splits; None if names say nothing. `nearest`: the row of `train` for each of `val`. Relatives are a small share of the training
    samples, so that this does not happen by chance or because a series is a kind of thing."""
    mine, others = [series_of(n) for n in val], [series_of(n) for n in train]
    sizes = Counter(others)
    related = [i for i, s in enumerate(mine) if s in sizes]
    if len(related) < FEWEST or sum(sizes[mine[i]] for i in related) > RARE * len(related) * len(others):
        return None
    found = [i for i in related if others[nearest[i]] == mine[i]]
    pairs = [(val[i], train[nearest[i]]) for i in found[:5]]
    return {"nearest": len(found), "of": len(related), "torn": len(found) >= NEAREST * len(related), "pairs": pairs}
