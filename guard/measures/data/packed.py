"""Targets that were packed (`pack_padded_sequence`), and the tokens that the model read: whether they are the same places."""

from collections import deque
from typing import Any

import torch
from torch import Tensor
from trainworthy.guard.hooks.addresses import address_of
from trainworthy.guard.hooks.trees import tensors


class Packed:
    """The first targets of a class loss that are packed tokens of the model's own input, from its first token on."""

    def __init__(self) -> None:
        # Address of the packed tokens, tokens (B, T), sizes
        self.sources: deque[tuple[int, Tensor, Tensor]] = deque(maxlen=8)
        self.call: tuple | None = None  # model, arguments, tokens that it reads, rows at each time
        self.shifted = False

    def pack(self, given: Tensor, batch_first: bool, out: Any) -> None:
        """Note tokens that were packed. `out`: the `PackedSequence`."""
        if given.dim() != 2 or given.is_floating_point():
            return
        rows = given if batch_first else given.t()
        rows = rows if out.sorted_indices is None else rows[out.sorted_indices]
        self.sources.append((address_of(out.data), rows.detach(), out.batch_sizes))

    def loss(self, target: Tensor, root: tuple) -> None:
        """Note the target of a class loss, and the model's call before it."""
        found = next(
            (s for s in reversed(self.sources) if s[0] == address_of(target) and int(s[2].sum()) == len(target)), None
        )
        if found is None or self.call is not None or self.shifted:
            return
        _, rows, sizes = found
        for ids in (x for x in tensors(root[1:]) if x.dtype == torch.int64 and x.dim() == 2):
            if len(ids) == len(rows) and len(rows) > 1:
                self.shifted = fits(ids, rows, sizes, 1)
                if not self.shifted and fits(ids, rows, sizes, 0):
                    self.call = (*root, ids, sizes)


def fits(ids: Tensor, rows: Tensor, sizes: Tensor, shift: int) -> bool:
    """Return whether each packed row is a row of `ids`, in any order, from token `shift` on."""
    for r, row in enumerate(rows):
        n = int((sizes > r).sum())
        if shift + n > ids.shape[1] or not bool((ids[:, shift : shift + n] == row[:n]).all(1).any()):
            return False
    return True
