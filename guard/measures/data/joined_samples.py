"""Batches whose samples are joined into one tensor: rows of different lengths one after the other, with their lengths or offsets, and
graphs whose nodes carry the number of their graph."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

WHOLE = (torch.int64, torch.int32)


class Joined(NamedTuple):
    """One tensor of joined rows."""

    rows: int
    """Its index among the entries of the batch."""
    cuts: int
    """Index of the entry that holds the lengths of the rows, or the place at which each of them begins."""
    lengths: list[int]
    offsets: bool
    last: bool
    """The offsets end with the length of the whole."""


def joined(leaves: list, n: int) -> list[Joined]:
    """Return the entries of a batch of `n` samples that hold joined rows."""
    whole = [(i, x) for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.dim() == 1 and x.dtype in WHOLE]
    found: list[Joined] = []
    for i, x in enumerate(leaves):
        if not isinstance(x, Tensor) or not x.dim() or len(x) == n:
            continue
        for j, cuts in whole:
            if j == i or len(cuts) not in (n, n + 1):
                continue
            one = fitting(i, j, cuts.tolist(), len(x), n)
            if one is not None:
                found.append(one)
                break
    return found


def fitting(i: int, j: int, cuts: list[int], total: int, n: int) -> Joined | None:
    """Return how whole numbers cut `total` rows into `n` samples; None if they do not."""
    if len(cuts) == n and sum(cuts) == total and min(cuts) >= 0:
        return Joined(i, j, cuts, False, False)
    last = len(cuts) == n + 1
    ends = cuts[1:] if last else [*cuts[1:], total]
    lengths = [b - a for a, b in zip(cuts, ends, strict=False)]
    fits = (
        cuts[0] == 0
        and min(lengths) >= 0
        and ends[-1] == total > n
        and (last or cuts[-1] < total)
        and lengths.count(0) <= 0.1 * n
    )
    return Joined(i, j, lengths, True, last) if fits and n > 1 else None


def arranged(leaves: list, one: Joined, order: list[int]) -> None:
    """Put the samples `order` in place of those of the batch, in both entries."""
    rows, cuts = leaves[one.rows], leaves[one.cuts]
    parts = rows.split(one.lengths)
    lengths = [one.lengths[k] for k in order]
    leaves[one.rows] = torch.cat([parts[k] for k in order])
    new = torch.tensor(lengths, dtype=cuts.dtype)
    if one.offsets:
        new = torch.cat([new.new_zeros(1), new.cumsum(0).to(cuts.dtype)])
        new = new if one.last else new[:-1]
    leaves[one.cuts] = new.to(cuts.device)


def arrange(
    leaves: list, n: int, order: list[int], mine: Callable[[int], bool] = lambda i: True
) -> tuple[set[int], int]:
    """Put the samples `order` in place of those of the batch in all joined entries that may be changed. Return the indices of all that
    belong to joined entries, and how many were changed. Entries that share their lengths are changed together or not at all."""
    found = joined(leaves, n)
    cuts = {one.cuts: leaves[one.cuts] for one in found}
    fixed = {one.cuts for one in found if not mine(one.rows)}
    chosen = [one for one in found if one.cuts not in fixed]
    for one in chosen:
        leaves[one.cuts] = cuts[one.cuts]
        arranged(leaves, one, order)
    return {i for one in found for i in (one.rows, one.cuts)}, len(chosen)


def graphs(leaves: list) -> bool:
    """Return whether the rows of a batch are nodes: an entry numbers the samples that they belong to, one after the other."""
    tensors = [x for x in leaves if isinstance(x, Tensor) and x.dim()]
    for x in tensors:
        if x.dim() != 1 or x.dtype != torch.int64 or len(x) < 4 or int(x[0]) or bool((x.diff() < 0).any()):
            continue
        steps, count = x.diff(), int(x[-1]) + 1
        fits = bool((steps <= 1).all()) and 1 < count <= len(x) // 2
        if fits and {count, len(x)} <= {len(y) for y in tensors if y is not x}:
            return True
    return False


def unfit(batch: Any) -> str:
    """Return why the samples of a batch cannot be exchanged; empty if they can."""
    leaves = tree_leaves(batch)
    if graphs(leaves) or any(hasattr(x, "edge_index") and hasattr(x, "batch") for x in leaves):
        return "the rows of a batch are nodes of several graphs: eight samples cannot be taken from it row by row"
    return ""
