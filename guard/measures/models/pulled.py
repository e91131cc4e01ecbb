"""Finds soft updates with two sides exchanged: trained weights that are moved towards a copy that never moves, and an average that keeps the
small share of itself and takes the large one of the weights."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from trainworthy.core.base.doubles import to_double
from trainworthy.core.base.verdict import Fault
from trainworthy.guard.hooks.parameters import parameters_of

FEW, ENTRIES = 3, 64  # parameters of an optimiser, and their first entries, that are compared
MOST = 0.9  # of the distance: an average that follows by more averages hardly anything
OFTEN = 4  # steps before which the weights were moved so
EXACT = 1e-3  # of the distance moved: rounding of tau * a + (1 - tau) * b


def probe(parameters: list[Tensor]) -> Tensor:
    """Return some values of an optimiser's first parameters."""
    return torch.cat([to_double(p.detach().flatten()[:ENTRIES]) for p in parameters[:FEW]])


class Pulled:
    def __init__(self) -> None:
        self.pulls: dict[int, tuple[list[Tensor], list[float]]] = {}
        """Copy -> these parameters of it, and by which share of the distance the trained weights were moved to it."""
        self.copies: dict[int, tuple[Tensor, list[float]]] = {}
        """Copy -> its values before the next step, and by which share of the distance it followed the trained weights."""

    def between(self, parameters: list[Tensor], last: Tensor, now: Tensor, models: Iterable[nn.Module]) -> None:
        """Compare weights right after a step with those right before the next one."""
        change = now - last
        if len(parameters) < FEW:
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
            there = probe(theirs)
            if share := way(change, there - last):
                self.pulls.setdefault(id(theirs[0]), (theirs, []))[1].append(share)
            before, followed = self.copies.get(id(theirs[0]), (there, []))
            followed.append(way(there - before, last - before))
            self.copies[id(theirs[0])] = (there, followed)

    def fault(self, moved: Callable[[Tensor], bool]) -> Fault | None:
        """`moved`: whether a tensor has changed since before training."""
        for theirs, shares in self.pulls.values():
            if len(shares) >= OFTEN and not any(map(moved, theirs)):
                return (
                    f"before {len(shares)} steps the trained weights were moved by {sum(shares) / len(shares):.2g} of the distance to a copy that "
                    "never moves",
                    "source and target of the soft update are exchanged: target = tau * trained + (1 - tau) * target",
                )
        for _, followed in self.copies.values():
            shares = [x for x in followed if x]
            if (
                len(shares) >= OFTEN
                and len(shares) >= len(followed) - 2
                and min(shares) > MOST
                and max(shares) < 1 - EXACT
            ):
                return (
                    f"before {len(shares)} steps an average of the weights was moved by {min(shares):.3g} of the distance to them: it holds hardly "
                    "more than the weights of the last step",
                    "the two shares are exchanged: average = momentum * average + (1 - momentum) * weights",
                )
        return None


def way(change: Tensor, gap: Tensor) -> float:
    """Return which share of a gap a change is; 0 if it is none, or goes another way."""
    share = float(change @ gap / (gap @ gap).clamp_min(1e-30))
    exact = bool(change.any()) and float((change - share * gap).norm()) < EXACT * float(change.norm())
    return share if exact and 0 < share <= 1 else 0.0
