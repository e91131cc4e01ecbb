"""Two views of each sample in a batch: does the model get both, or one of them twice?"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from trainworthy.core.base.verdict import Fault
from trainworthy.guard.hooks.addresses import address_of

BATCHES, LEAST = 40, 6  # that are followed; how many must agree
CAUSE = "both calls get the same view (a copied line, a loop that overwrites its variable): each of the two is meant"


class Views:
    """How often models got each entry of the first batches."""

    def __init__(self) -> None:
        self.drawn = 0
        self.batches: list[tuple[dict[int, tuple[int, ...]], Counter]] = []  # shapes of a sample by entry, and times
        self.joined: list[bool] = []  # calls on pictures: whether the second half of the batch is the first one again

    def batch(self, leaves: list[Any]) -> None:
        """Note the entries of a batch."""
        self.drawn += 1
        if len(self.batches) < BATCHES:
            shapes = {i: tuple(x.shape[1:]) for i, x in enumerate(leaves) if isinstance(x, Tensor)}
            self.batches.append((shapes, Counter()))

    def root(self, given: list[Tensor], made: list[Tensor], places: Sequence[Mapping[int, int]]) -> None:
        """Note a model's call in training, with its outputs. `places`: address -> entry of the last batches, for a loop may fetch ahead."""
        pictures = (x for x in given if x.dim() == 4 and x.is_floating_point() and len(x) > 2 and len(x) % 2 == 0)
        if len(self.joined) < BATCHES and (x := next(pictures, None)) is not None:
            out = next((y for y in made if y.dim() and len(y) == len(x)), None)
            # Dropout, noise and classes that differ are meant: IWAE, R-Drop, guidance
            self.joined.append(
                torch.equal(*x.chunk(2)) and out is not None and torch.allclose(*out.detach().chunk(2), 1e-3, 1e-5)
            )
        for x in given if self.drawn <= BATCHES else ():
            known = ((n, at[address_of(x)]) for n, at in enumerate(reversed(places), 1) if address_of(x) in at)
            back, entry = next(known, (0, 0))
            if back and x.dim() > 2 and x.is_floating_point():
                shapes, times = self.batches[-back]
                times[entry] += shapes[entry] == tuple(x.shape[1:])

    def fault(self) -> Fault | None:
        """Find a view that models got twice in every batch, beside another one of its shape that they never got."""
        if len(self.joined) >= LEAST and all(self.joined):
            return (
                f"in all of {len(self.joined)} calls the second half of the pictures is the first one again, and its outputs, too",
                "each picture was augmented once, and the result taken twice: augment it anew for each view",
            )
        odd: Counter = Counter()
        used = [(shapes, times) for shapes, times in self.batches if times]
        for shapes, times in used:
            twice, never = ([i for i, shape in shapes.items() if shape and times[i] == n] for n in (2, 0))
            odd.update((a, b) for a in twice for b in never if shapes[a] == shapes[b])
        for (a, b), times in odd.items():
            if times >= LEAST and times >= len(used) - 1:
                return (
                    f"in {times} of {len(used)} batches models got entry {a} twice, and never entry {b}, which has its shape",
                    CAUSE,
                )
        return None
