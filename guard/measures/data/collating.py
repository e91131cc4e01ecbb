"""Collates samples together and one by one: a function that sorts, pads or stacks must keep each sample's entries together."""

import copy
import time
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate
from trainworthy.guard.hooks.trees import tensors

SAMPLES, FEWEST = 12, 4
SHARE = 0.25  # of the rows whose entries are those of different samples
CAUSE = (
    "a batch's rows are sorted or filtered (by length, for packing) and one of their entries is not: apply the same order to "
    "inputs, lengths and labels"
)


def mispaired(loader: DataLoader, limit: float) -> tuple[str, str] | None:
    """Find a collate function that gives samples the labels of others. What it draws or mixes is not recognised, and says nothing."""
    data, collate = loader.dataset, loader.collate_fn
    if isinstance(data, IterableDataset) or loader.batch_sampler is None or collate in (None, default_collate):
        return None
    n, items = min(SAMPLES, len(data)), []
    for i in torch.linspace(0, len(data) - 1, n).long().tolist():
        items.append(data[i])
        if time.monotonic() > limit:
            return None
    together = tensors(collate(copy.deepcopy(items)))
    single = [tensors(collate([copy.deepcopy(one)])) for one in items]
    if n < FEWEST or any(len(x) != len(together) for x in single):
        return None
    if any(x.shape == (n,) and torch.equal(x.double().sort().values, torch.arange(n).double()) for x in together):
        return None  # it may be the order in which outputs are to be brought back
    found: list[tuple[list[Tensor], list[set[int]]]] = []
    for k, entry in enumerate(together):
        axis = next((a for a in range(min(entry.dim(), 2)) if entry.shape[a] == n), None)
        own = [x[k] for x in single]
        if axis is None or any(x.dim() != entry.dim() or x.shape[axis] != 1 for x in own):
            continue
        mine = [x.select(axis, 0) for x in own]
        homes = [{j for j, x in enumerate(mine) if fits(x, row)} for row in entry.unbind(axis)]
        if all(homes) and any(len(h) < n for h in homes) and set().union(*homes) == set(range(n)):
            found.append((mine, homes))
    kinds = [[all(map(same, a, b)) for b, _ in found] for a, _ in found]
    found = [f for f, row in zip(found, kinds, strict=True) if sum(row) == 1]  # others are negatives of one another
    for i, (_, first) in enumerate(found):
        for _, second in found[:i]:
            mixed = sum(not a & b for a, b in zip(first, second, strict=True))
            if mixed >= max(2, SHARE * n):
                return f"in {mixed} of {n} rows of a batch the entries are those of different samples", CAUSE
    return None


def same(a: Tensor, b: Tensor) -> bool:
    """Return whether two rows hold the same values."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


def fits(x: Tensor, row: Any) -> bool:
    """Return whether a row is a sample's own, possibly padded at one end of its first axis."""
    if same(x, row):
        return True
    if not x.dim() or x.shape[1:] != row.shape[1:] or x.dtype != row.dtype or not 0 < len(x) < len(row):
        return False
    ends = ((row[: len(x)], row[len(x) :]), (row[-len(x) :], row[: -len(x)]))
    return any(torch.equal(mine, x) and bool((rest == rest.flatten()[0]).all()) for mine, rest in ends)
