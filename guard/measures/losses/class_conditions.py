"""Compares the class labels that a generator is conditioned on with those that its critic gets, as an argument or in a loss."""

from typing import Any

import torch
from torch import Tensor, nn
from trainworthy.guard.hooks.addresses import address_of
from trainworthy.guard.hooks.parameters import parameters_of
from trainworthy.guard.hooks.trees import tensors

CALLS = 400
ENOUGH, SHARE = 8, 0.4  # critic's calls with other labels; with the same ones in its own step there may be as many
CAUSE = (
    "the critic judges generated samples by the labels of other samples (those of the real ones): it must get the labels "
    "that the generator got"
)


class Conditions:
    """Labels of the models' last calls, and how often a critic got those of the generator."""

    def __init__(self) -> None:
        self.calls = 0
        self.given: dict[int, list[Tensor]] = {}  # model -> labels that its last call got
        self.heads: dict[int, tuple[int, int, list[Tensor]]] = {}
        """Address of a critic's scores -> critic, maker, labels."""
        self.pairs: dict[tuple[int, int], list[int]] = {}  # critic and maker -> calls with the same labels, with others

    def root(self, module: nn.Module, args: tuple, kwargs: dict, out: Any, maker: int) -> None:
        """Note a call with gradients. `maker`: the model whose output is the input, if the gradient reaches it."""
        self.calls += 1
        if self.calls > CALLS:
            return
        own, theirs = labels(args, kwargs), self.given.get(maker, [])
        self.heads = {}
        if theirs and own:
            self._note((id(module), maker), own, theirs)
        elif theirs:
            scores = [x for x in tensors(out) if x.dim() == 2 and x.shape[1] > 1]
            self.heads = {address_of(x): (id(module), maker, theirs) for x in scores}
        if not maker:
            self.given[id(module)] = own

    def loss(self, scores: Tensor, target: Tensor) -> None:
        """Note the targets of a class loss on a critic's scores."""
        if (row := self.heads.pop(address_of(scores), None)) is not None:
            critic, maker, theirs = row
            self._note((critic, maker), labels((target,), {}), theirs)

    def _note(self, key: tuple[int, int], own: list[Tensor], theirs: list[Tensor]) -> None:
        pairs = [(a, b) for a in own for b in theirs if a.shape == b.shape]
        if pairs:
            same = any(torch.equal(a, b.to(a.device)) for a, b in pairs)
            self.pairs.setdefault(key, [0, 0])[not same] += 1


def labels(args: tuple, kwargs: dict) -> list[Tensor]:
    """Return class numbers (N,) among a model's arguments; one-hot rows (N, C) count."""
    found = []
    for x in (*args, *kwargs.values()):
        if not isinstance(x, Tensor) or not x.dim() or len(x) < 4:
            continue
        flags = x.dim() == 2 and x.shape[1] > 1 and not x.requires_grad and bool(((x == 0) | (x == 1)).all())
        if x.dim() == 1 and x.dtype in (torch.int64, torch.int32):
            found.append(x.detach().long())
        elif flags and bool((x.sum(1) == 1).all()):
            found.append(x.argmax(1))
    return [x.clone() for x in found if bool((x != x[0]).any())]


def check(seen: Any) -> tuple[tuple[str, str] | None, str]:
    """Return what is wrong if a critic with an optimiser of its own gets other labels than the generator, and what was measured."""
    measured = ""
    for (critic, maker), (same, other) in seen.evidence.conditions.pairs.items():
        owners = [{id(p) for p in parameters_of(seen.roots[i])} for i in (critic, maker) if i in seen.roots]
        groups = [{id(p) for p in g.parameters} for g in seen.groups.values()]
        if len(owners) < 2 or any(g & owners[0] and g & owners[1] for g in groups):
            continue  # of a model in two parts, each may have a condition of its own
        if other >= ENOUGH and other >= SHARE * (same + other):
            return (
                f"in {other} of {same + other} calls the critic got other labels than the generator that made its input",
                CAUSE,
            ), ""
        measured = f"the critic gets the generator's labels ({same} calls)"
    return None, measured
