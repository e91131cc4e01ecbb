"""Compares rows: does a loss get the targets of a batch in the order in which the model got their inputs?

Only values are compared, so a copy on a device or of another type counts. What was mixed, cropped or drawn is not found
among the batch's rows, and nothing is said about it.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from trainworthy.core.base.doubles import to_double
from trainworthy.guard.hooks.trees import tensors

LOOKS = 24  # calls of losses that are compared
ROWS, WIDTH = 4096, 4096  # of a batch; entries of a row that are read


class Pairing:
    """Counts the losses whose targets are in the order of the model's inputs, and those whose targets are not."""

    def __init__(self) -> None:
        self.looks = 0
        self.given: list[Tensor] = []  # what models were called with since the last batch
        self.steps: dict[int, list[int]] = {}  # optimiser step -> losses in order, losses in another order
        self.looked: set[int] = set()  # steps whose losses were compared
        self.detail = ""

    def batch(self) -> None:
        """A new batch was drawn."""
        self.given = []

    def root(self, args: tuple, kwargs: dict) -> None:
        """Note the inputs of a model's call with gradients."""
        if self.looks < LOOKS and len(self.given) < 8:
            self.given += [x.detach() for x in tensors((args, kwargs)) if x.dim() > 1][:4]

    def loss(self, name: str, target: Tensor, batches: Iterable[Any], step: int) -> None:
        """Compare one call of a loss with the last batches."""
        if self.looks >= LOOKS or not self.given or not 2 <= (len(target) if target.dim() else 0) <= ROWS:
            return
        self.looks += 1
        self.looked.add(step)
        for batch in batches:
            found = self._compare(target.detach(), tensors(batch))
            if found is None:
                continue
            row = self.steps.setdefault(step, [0, 0])
            row[found > 0] += 1
            if found:
                self.detail = (
                    f"{found} of {len(target)} targets of {name} are those of other rows than the model's inputs"
                )
            return

    def _compare(self, target: Tensor, leaves: list[Tensor]) -> int | None:
        """Return how many targets are not those of their inputs; None if rows of the batch are not recognised."""
        every = [(x, g) for g in self.given for x in leaves if x.shape == g.shape]
        inputs = [(x, g) for x, g in every if x.is_floating_point() == g.is_floating_point()]
        orders = [o for x, g in inputs if (o := order(x, g)) is not None and len(o) == len(target)]
        if not orders:  # or the targets are joined in one row (CTC): not one for each sample
            return None
        chosen = {id(x) for x, _ in inputs}
        wrong = []
        for y in leaves:
            if id(y) in chosen or len(y) != len(target) or y.numel() != target.numel() if y.dim() else True:
                continue
            a, b = numbers(y), numbers(target)
            if len(a.unique(dim=0)) < 2:
                continue
            if any(torch.equal(a[o], b) for o in orders):
                return 0
            if torch.equal(a[ranked(a)], b[ranked(b)]):
                wrong.append(min(int((a[o] != b).any(1).sum()) for o in orders))
        return min(wrong, default=None)


def numbers(x: Tensor) -> Tensor:
    """Return rows as numbers, on the CPU."""
    return to_double(x.detach().reshape(len(x), -1)[:, :WIDTH])


def ranked(rows: Tensor) -> Tensor:
    """Return the order that sorts rows."""
    where = torch.arange(len(rows))
    for column in range(min(rows.shape[1], 16) - 1, -1, -1):
        where = where[rows[where, column].argsort(stable=True)]
    return where


def order(x: Tensor, given: Tensor) -> Tensor | None:
    """Return which row of `x` each row of `given` is; None if they are not the same rows, or not all different."""
    a, b = numbers(x), numbers(given)
    if torch.equal(a, b) or torch.equal(a.float(), b.float()):
        return torch.arange(len(a)) if len(a.unique(dim=0)) > 1 else None
    places = {row.numpy().tobytes(): i for i, row in enumerate(a.float())}
    found = [places.get(row.numpy().tobytes(), -1) for row in b.float()]
    return torch.tensor(found) if len(places) == len(a) and min(found) >= 0 else None


def check(one: Pairing) -> tuple[str, str] | None:
    """Return what is wrong if at nearly every step all losses with the batch's targets had them in another order. Targets that
    were computed from the batch's (1 - y) are the same values by chance at some steps."""
    wrong = sum(not right and off > 0 for right, off in one.steps.values())
    if wrong < 4 or wrong < len(one.steps) or wrong < 0.8 * len(one.looked):
        return None
    return (
        f"{one.detail}, at each of {wrong} steps",
        "inputs or targets of a batch are shuffled, rolled, sorted or indexed alone, inside the loop",
    )
