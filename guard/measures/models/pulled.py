"""Finds trained weights that are moved, between their steps, towards a copy that never moves: a soft update with its two sides exchanged."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from trainworthy.core.base.doubles import to_double
from trainworthy.core.base.verdict import Fault
from trainworthy.guard.hooks.parameters import parameters_of

FEW, ENTRIES = 3, 64  # parameters of an optimiser, and their first entries, that are compared
OFTEN = 4  # steps before which the weights were moved so
EXACT = 1e-3  # of the distance moved: rounding of tau * a + (1 - tau) * b


def probe(parameters: list[Tensor]) -> Tensor:
    """Return some values of an optimiser's first parameters."""
    return torch.cat([to_double(p.detach().flatten()[:ENTRIES]) for p in parameters[:FEW]])


class Pulled:
    def __init__(self) -> None:
        self.pulls: dict[int, tuple[list[Tensor], list[float]]] = {}
        """Copy -> these parameters of it, and by which share of the distance the trained weights were moved to it."""

    def between(self, parameters: list[Tensor], last: Tensor, now: Tensor, models: Iterable[nn.Module]) -> None:
        """Compare weights right after a step with those right before the next one."""
        change = now - last
        if len(parameters) < FEW or not bool(change.any()):
            return
        lists = [list(parameters_of(m)) for m in models]
        chosen = [id(p) for p in parameters[:FEW]]
        own = next((x for x in lists if set(chosen) <= {id(p) for p in x}), None)
        if own is None:
            return
        places = [next(i for i, p in enumerate(own) if id(p) == one) for one in chosen]
        for other in lists:
            alike = len(other) == len(own) and all(
                a.shape == b.shape and a is not b for a, b in zip(own, other, strict=True)
            )
            if not alike:
                continue
            theirs = [other[i] for i in places]
            gap = probe(theirs) - last
            share = float(change @ gap / (gap @ gap).clamp_min(1e-30))
            if 0 < share <= 1 and float((change - share * gap).norm()) < EXACT * float(change.norm()):
                self.pulls.setdefault(id(theirs[0]), (theirs, []))[1].append(share)

    def fault(self, moved: Callable[[Tensor], bool]) -> Fault | None:
        """`moved`: whether a tensor has changed since before training."""
        for theirs, shares in self.pulls.values():
            if len(shares) >= OFTEN and not any(map(moved, theirs)):
                return (
                    f"before {len(shares)} steps the trained weights were moved by {sum(shares) / len(shares):.2g} of the distance to a copy that "
                    "never moves",
                    "source and target of the soft update are exchanged: target = tau * trained + (1 - tau) * target",
                )
        return None
