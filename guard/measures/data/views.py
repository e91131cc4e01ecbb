"""Two views of each sample in a batch: does the model get both, or one of them twice?"""

from collections import Counter

from torch import Tensor
from trainworthy.core.base.verdict import Fault
from trainworthy.guard.hooks.addresses import address_of

BATCHES, LEAST, LATE = 40, 6, 4  # that are followed; how many must agree; by how many a loop may fetch ahead
CAUSE = "both calls get the same view (a copied line, a loop that overwrites its variable): each of the two is meant"


class Views:
    """How often models got each entry of the first batches."""

    def __init__(self) -> None:
        self.batches: list[tuple[list[Tensor], Counter]] = []

    def batch(self, leaves: list[Tensor]) -> None:
        """Note the entries of a batch; they stay alive as long as they may be used."""
        if len(self.batches) < BATCHES:
            self.batches.append((leaves, Counter()))
            for old, _ in self.batches[: -LATE - 1]:
                old[:] = [x.new_empty((0, *x.shape[1:])) for x in old]

    def root(self, given: list[Tensor]) -> None:
        """Note a model's call in training."""
        for x in given:
            if x.dim() < 3 or not x.is_floating_point():
                continue
            for leaves, times in reversed(self.batches[-LATE:]):
                if found := [i for i, y in enumerate(leaves) if y.shape == x.shape and address_of(y) == address_of(x)]:
                    times[found[0]] += 1
                    break

    def fault(self) -> Fault | None:
        """Find a view that models got twice in every batch, beside another one of its shape that they never got."""
        odd: Counter = Counter()
        used = [(leaves, times) for leaves, times in self.batches if times]
        for leaves, times in used:
            twice, never = ([i for i, x in enumerate(leaves) if x.shape[1:] and times[i] == n] for n in (2, 0))
            odd.update((a, b) for a in twice for b in never if leaves[a].shape[1:] == leaves[b].shape[1:])
        for (a, b), times in odd.items():
            if times >= LEAST and times >= len(used) - 1:
                return (
                    f"in {times} of {len(used)} batches models got entry {a} twice, and never entry {b}, which has its shape",
                    CAUSE,
                )
        return None
