"""Loops without a loader: are inputs and targets of a batch taken from the same rows of the data?

At each optimiser step the script's variables are read: the long tensors that hold its data, and those of a batch. A loop whose model
gets rows of one tensor while a batch holds other rows of another is at fault if the rows of both belong together as they are stored.
"""

import inspect
from itertools import islice, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from trainworthy.core.data.alike import nearest
from trainworthy.guard.hooks.addresses import address_of, home_of
from trainworthy.guard.hooks.trees import tensors
from trainworthy.guard.measures.records import own_frames

STEPS = 12  # optimiser steps that are read
ENOUGH = 8
ROWS, MOST = 200, 50_000  # rows of data that are compared
FRAMES = 2
SAMPLE, WIDTH = 1000, 256  # rows and entries that are compared
CLOSER = 0.7  # distance of two targets whose inputs are neighbours, as a part of that of any two


class Read(NamedTuple):
    """Rows of a tensor that are in a batch."""

    data: Tensor
    rows: Tensor


class Indexed:
    """What a model got between two optimiser steps, and the rows that the script's batch holds."""

    def __init__(self) -> None:
        self.given: list[Tensor] = []
        self.calls = 0
        self.steps: list[tuple[list[Read], list[Read]]] = []  # what a model got, and the rest
        self.places: dict[int, tuple[Tensor, dict[bytes, int]]] = {}

    def root(self, args: tuple, kwargs: dict) -> None:
        """Note the inputs of a model's call in training."""
        self.calls += 1
        if len(self.steps) < STEPS and self.calls == 1:
            self.given = [x.detach() for x in tensors((args, kwargs)) if x.dim()][:4]

    def step(self) -> None:
        """An optimiser made a step."""
        if len(self.steps) < STEPS and self.calls == 1 and self.given:
            self.steps.append(self.read(inspect.currentframe(), self.given))
        elif len(self.steps) < STEPS:
            self.steps.append(([], []))
        self.given, self.calls = [], 0

    def read(self, frame: Any, given: list[Tensor]) -> tuple[list[Read], list[Read]]:
        """Find the rows of a model's inputs and of the other tensors of a batch in the data."""
        held: dict[int, Tensor] = {}
        for own in islice(own_frames(frame), FRAMES):
            for scope in (own.f_locals, own.f_globals):
                held |= {id(v): v for v in list(scope.values()) if type(v) is Tensor and plain(v)}
        long = [v for v in held.values() if ROWS <= len(v) <= MOST]
        got = [(g, r) for g in given if plain(g) for a in long if (r := self.rows(a, g)) is not None]
        homes = {address_of(g) for g in given}
        rest = []
        for g, r in got[:1]:
            for t in held.values():
                if len(t) == len(g) and address_of(t) not in homes:
                    fit = [b for b in long if len(b) == len(r.data) and b is not r.data]
                    rest += [found for b in fit if (found := self.rows(b, t)) is not None]
        return [r for _, r in got], rest

    def rows(self, data: Tensor, batch: Tensor) -> Read | None:
        """Return which rows of the data a batch holds; None if it holds others, or too few can be told apart."""
        if batch.shape[1:] != data.shape[1:] or not 8 <= len(batch) <= len(data) / 2 or batch.dtype != data.dtype:
            return None
        if id(data) not in self.places:
            found: dict[bytes, int] = {}
            for i, row in enumerate(data.detach().cpu().reshape(len(data), -1)[:, :WIDTH].numpy()):
                found[row.tobytes()] = -1 if row.tobytes() in found else i
            self.places[id(data)] = (data, found)
        known = self.places[id(data)][1]
        part = batch.detach().cpu().reshape(len(batch), -1)[:, :WIDTH].numpy()
        rows = torch.tensor([known.get(row.tobytes(), -2) for row in part])
        if int((rows == -2).sum()) or int((rows < 0).sum()) > 0.1 * len(rows):
            return None
        return Read(data, rows)


def plain(x: Tensor) -> bool:
    """Return whether a tensor may hold samples."""
    return x.dim() > 0 and not x.requires_grad and x.is_floating_point() and x.dtype != torch.bfloat16


def check(one: Indexed) -> tuple[str, str] | None:
    """Return what is wrong if at every step the inputs' rows were others than those of the only other tensor."""
    pairs = [mismatched(got, rest) for got, rest in one.steps]
    if len(pairs) < ENOUGH or any(p is None for p in pairs):
        return None
    if any(torch.equal(b.rows, a.rows) for (a, _), (_, b) in pairwise(p for p in pairs if p)):
        return None  # a variable of the step before
    if any(torch.equal(b.rows, c.rows) for (_, b), (_, c) in pairwise(p for p in pairs if p)):
        return None
    a, b = pairs[0]  # type: ignore[misc]
    if any(p[0].data is not a.data or p[1].data is not b.data for p in pairs if p):
        return None
    share = belonging(a.data, b.data)
    if share is None or share > CLOSER:
        return None
    return (
        f"at each of {len(pairs)} steps a model gets rows of one tensor, and the batch holds other rows of the other one of {len(a.data)} rows, "
        f"although their rows belong together (targets of neighbouring inputs are {share:.2f} times as far from each other as any two)",
        "inputs or targets are shuffled or indexed alone: use the same indices for both",
    )


def mismatched(got: list[Read], rest: list[Read]) -> tuple[Read, Read] | None:
    """Return a model's input and the only other tensor of its length, if they hold other rows, not shifted ones."""
    if len(got) != 1 or len(rest) != 1:
        return None
    a, b = got[0], rest[0]
    if home_of(a.data) == home_of(b.data):
        return None
    lag = (a.rows - b.rows)[(a.rows >= 0) & (b.rows >= 0)]  # a forecast reads later rows
    if len(lag.unique()) < 0.5 * len(lag) or float(lag.abs().double().median()) < 0.02 * len(a.data):
        return None
    return a, b


def belonging(a: Tensor, b: Tensor) -> float | None:
    """Return how far targets of neighbouring inputs are from each other, as a part of the distance of any two."""
    where = torch.linspace(0, len(a) - 1, min(SAMPLE, len(a)), device="cpu").long()
    x, y = (v.detach().cpu()[where].reshape(len(where), -1)[:, :WIDTH].double() for v in (a, b))
    if not b.is_floating_point():
        low, high = int(y.min()), int(y.max())
        y = torch.nn.functional.one_hot(y[:, 0].long() - low, high - low + 1).double() if high - low < WIDTH else y
    x, y = ((v - v.mean(0)) / v.std(0).clamp_min(1e-12) for v in (x, y))
    usual = float((y - y.roll(len(y) // 2 + 1, 0)).norm(dim=1).mean())
    return float((y - y[nearest(-torch.cdist(x, x), own=True)]).norm(dim=1).mean()) / usual if usual > 0 else None
