"""Finds samples that an evaluation leaves out: their label has no influence on any score. A loss beside the scores may still have it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Generator, Tensor
from trainworthy.core.base.names import more_is_better
from trainworthy.core.loop.run import Run
from trainworthy.core.recipe.stage import Data, Stage, View, categorical

SAMPLES = 10  # each is labelled otherwise in turn, so a metric without a tenth of the samples shows
CLASSES = 20  # with more, not every label can be tried


class Relabelled(View):
    """A view of which one sample has another class."""

    other: tuple[str, int, int] | None = None
    """Field, position and class of the change."""

    def make(self, index: int, got: Any, generator: Generator | None) -> dict[str, Any]:
        sample = super().make(index, got, generator)
        if self.other is None or index != self.other[1]:
            return sample
        key, was = self.other[0], sample[self.other[0]]
        label = self.other[2]
        return {**sample, key: torch.full_like(was, label) if isinstance(was, Tensor) else type(was)(label)}


def left_out(run: Run, stage: Stage, val: Data, indices: Sequence[int]) -> list[int]:
    """Return those of `indices` whose label no metric depends on, whichever class they get. Nothing if they are chosen by their place
    (every second sample, to save time), or if no label has an influence: the evaluation then reads its labels elsewhere."""
    key, some = categorical(val), list(indices)[:SAMPLES]
    if any(f.role == "source" for f in val.fields.values()):
        return []  # samples are generated, which takes minutes
    if key is None or len(some) < SAMPLES or not 2 <= len(val.fields[key].classes or ()) <= CLASSES:
        return []
    silent = _silent(run, stage, val, some, key)
    if not 0 < len(silent) < len(some):
        return []
    return silent if set(_silent(run, stage, val, some[1:] + some[:1], key)) == set(silent) else []


def _silent(run: Run, stage: Stage, val: Data, some: list[int], key: str) -> list[int]:
    """Return the samples whose class changes no metric of the evaluation of `some`."""
    view, n = Relabelled(val, some), len(val.fields[key].classes)

    def measured(other: tuple[str, int, int] | None) -> dict[str, float]:
        view.other = other
        found = run.measure(stage, view)
        return {k: v for k, v in found.items() if more_is_better(k) is not False} or found

    plain = measured(None)
    labels = [int(val.peek(i, key)) for i in some]
    places = enumerate(zip(some, labels, strict=True))
    return [i for at, (i, label) in places if not _matters(plain, measured, key, at, label, n)]


def _matters(plain: dict[str, float], measured: Callable, key: str, position: int, label: int, n: int) -> bool:
    """Return whether another class of the sample at `position` changes a metric."""
    for step in range(1, n):
        other = measured((key, position, (label + step) % n))
        if other.keys() != plain.keys() or any(
            other[k] != v and not (v != v and other[k] != other[k]) for k, v in plain.items()
        ):
            return True
    return False
