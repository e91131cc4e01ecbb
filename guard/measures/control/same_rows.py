"""Finds stored observations that are one and the same array: every row of a replayed batch is what the environment holds now.

States and next states are then equal, and equal rows have different targets. One batch of equal rows is no fault (several tries from one state).
"""

import hashlib

import torch
from torch import Tensor

ROWS, CALLS = 16, 256  # of a batch, at least; calls of each kind that are read
FEWEST, DISTINCT = 20, 3  # batches of each kind; different observations among them
SHARE = 0.98


class SameRows:
    """Counts batches whose rows are all equal, of calls with gradients and without, and losses with different targets for them."""

    def __init__(self) -> None:
        self.seen, self.same = {True: 0, False: 0}, {True: 0, False: 0}
        self.contents: dict[bool, set[bytes]] = {True: set(), False: set()}
        self.last = 0  # rows of the last batch with gradients, if all are equal
        self.varied = 0

    def root(self, given: Tensor, grad: bool) -> None:
        """Note a model's call."""
        if not given.is_floating_point() or given.dim() < 2 or len(given) < ROWS or self.seen[grad] >= CALLS:
            return
        self.seen[grad] += 1
        equal = bool((given == given[:1]).all())
        self.last = len(given) * equal if grad else self.last
        if equal:
            self.same[grad] += 1
            row = given[0].detach().contiguous().cpu().view(torch.uint8)
            self.contents[grad].add(hashlib.blake2b(row.numpy().tobytes(), digest_size=8).digest())

    def compared(self, prediction: Tensor, target: Tensor) -> None:
        """Note the targets of a loss: one for each row."""
        if self.last and len(target) == target.numel() == prediction.numel() == self.last:
            self.varied += bool((target != target[:1]).any())

    def fault(self) -> tuple[str, str] | None:
        """Return what was measured and its cause."""
        with_grad, without = self.contents[True], self.contents[False]
        if any(self.same[k] < max(FEWEST, SHARE * self.seen[k]) for k in (True, False)) or self.varied < FEWEST:
            return None
        if len(with_grad) < DISTINCT or len(with_grad & without) < SHARE * len(with_grad):
            return None
        return (
            f"in {self.same[True]} training batches all rows are equal, with different targets, and the net of the targets gets the same rows",
            "stored observations are one array that the environment changes in place: keep copies (obs.copy()) of states and next states",
        )
