"""Measures how far a loss falls whose target is an entry of the batch and no class number (regression, binary targets, CTC).

Each loss is recorded as its distance from its lowest possible value, with the same distance for the best constant prediction.
"""

from collections import Counter, deque
from collections.abc import Iterable
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from trainworthy.core.base.correlation import pearson
from trainworthy.core.base.doubles import to_double
from trainworthy.guard.hooks.addresses import address_of, home_of
from trainworthy.guard.hooks.trees import floats, tensors

CALLS = 2000
SEARCHED = 10**6  # larger targets are not searched for in the batch
READ = 131_072  # about so many entries of a prediction are compared
SQUARES = ("mse_loss", "difference")
BINARY = ("binary_cross_entropy_with_logits", "binary_cross_entropy")


class Fits:
    """Records the calls of these losses in training, and pairs of prediction and target in the evaluation."""

    def __init__(self) -> None:
        self.rows: dict[str, list[dict[str, float]]] = {}
        self.places: Counter = Counter()
        self.inputs: Counter = Counter()
        self.batches: deque = deque(maxlen=4)  # entries of the last batches
        self.calls = 0
        self.own = False  # the target is also the model's input
        self.last: dict[int, int] = {}
        """Address of a prediction in this step -> entry of the batch that it was compared with."""
        self.at = -1
        self.homes: set[int] = set()  # memory of the last outputs of a model
        self.direct = 0  # predictions that are such an output itself
        self.shared = 0  # predictions that were compared with two entries of a batch
        self.unit = 1.0  # largest target, in units of the largest value of an input of its shape
        self.root: tuple | None = None  # a model's call whose output is compared with an entry of the batch

    def batch(self, batch: Any) -> None:
        """Record the entries of a batch that the script gets."""
        self.batches.append(tree_leaves(batch))

    def answered(self, out: Any) -> None:
        """Record what a model returned in training."""
        self.homes = {home_of(x) for x in tensors(out)}

    def note(self, name: str, prediction: Tensor, target: Tensor, out: Any, root: tuple | None, step: int) -> None:
        """Record one loss with gradients; `out`: its value."""
        if target.requires_grad and not prediction.requires_grad:
            prediction, target = target, prediction
        if self.calls >= CALLS or root is None:
            return
        if not prediction.requires_grad or target.requires_grad or not target.dim():
            return
        if name != "ctc_loss" and (prediction.shape != target.shape or target.numel() < 2):
            return
        self.calls += 1
        self.direct += home_of(prediction) in self.homes
        given = [x for x in tensors(root[1:]) if x.dim()]
        alike_shape = next((x for x in given if x.shape == target.shape and x.is_floating_point()), None)
        if self.calls == 1 and alike_shape is not None:
            largest = float(alike_shape.detach().abs().max())
            self.unit = float(target.detach().abs().max()) / largest if largest > 0 else 1.0
        place = self._place(target.detach(), given) if target.numel() <= SEARCHED else None
        if place is None:
            return
        self.places[place] += 1
        self.last, self.at = (self.last if self.at == step else {}), step
        self.shared += self.last.setdefault(address_of(prediction), place) != place
        self.root = root if len(self.rows.get(name, ())) < 8 else self.root
        row = measure(name, prediction.detach(), target.detach(), out) | {"step": step}
        self.rows.setdefault(name, []).append(row)

    def _place(self, target: Tensor, given: list[Tensor]) -> int | None:
        """Return which entry of the batch the target is, and note which entries the model got."""
        for leaves in reversed(self.batches):
            tensors = [(i, x) for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.dim()]
            place = next((i for i, x in tensors if x.numel() == target.numel() and same(x, target)), None)
            if place is None:
                place = next((i for i, x in tensors if part(x, target)), None)
                self.own |= place is not None and any(begins_like(g, leaves[place]) for g in given)
            if place is None:
                continue
            inputs = tuple(i for i, x in tensors if any(x.numel() == g.numel() and alike(x, g) for g in given))
            self.own |= place in inputs
            if inputs:
                self.inputs[inputs] += 1
            return None if place in inputs else place
        return None

    def facts(self) -> dict[str, Any]:
        """Return what `interventions` compares; empty if there is no such loss, or the target is the model's own input."""
        if not self.rows or self.own:
            return {"own": self.own} if self.own else {}
        name = max(self.rows, key=lambda k: (len(self.rows[k]), k))
        rows = self.rows[name]
        return {
            "kind": name, "target": self.places.most_common(1)[0][0],
            "inputs": list(self.inputs.most_common(1)[0][0]) if self.inputs else [],
            "steps": [int(r["step"]) for r in rows],
            **{k: [r[k] for r in rows] for k in ("left", "blind", "spread", "other")},
        }  # fmt: skip


def measure(name: str, prediction: Tensor, target: Tensor, out: Any) -> dict[str, float]:
    """Return distances from the lowest possible loss: of the predictions (`left`), of the best constant (`blind`), and of the predictions against
    the targets of other rows (`other`). `spread` is the deviation of the predictions over the rows, divided by that of the targets."""
    if name == "ctc_loss":
        wide = prediction.float().exp()
        spread = float(wide.std(1).mean()) if wide.dim() == 3 and wide.shape[1] > 1 else 1.0
        value = float(out.detach().float().mean()) if isinstance(out, Tensor) else 0.0
        return {"left": value, "blind": float("nan"), "other": float("nan"), "spread": spread}
    p, y = (to_double(x.reshape(len(x), -1)[:, :: max(1, x.numel() // READ)]) for x in (prediction, target))
    other = y.roll(max(1, len(y) // 2), 0)
    mean = y.mean(0, keepdim=True).expand_as(y)
    if name in BINARY:
        p = p if name == BINARY[1] else p.sigmoid()
        p = p.clamp(1e-7, 1 - 1e-7)
        score = lambda q, t: float(F.binary_cross_entropy(q.clamp(0, 1), t) - entropy(t))  # noqa: E731
    elif name in SQUARES:
        score = lambda q, t: float(((q - t) ** 2).mean())  # noqa: E731
    else:
        score = lambda q, t: float((q - t).abs().mean())  # noqa: E731
        mean = y.median(0, keepdim=True).values.expand_as(y)
    if name in BINARY and not bool(((y >= 0) & (y <= 1)).all()):
        return {"left": float("nan"), "blind": float("nan"), "other": float("nan"), "spread": 1.0}
    wide = float(y.std(0, unbiased=False).mean())
    return {"left": score(p, y), "blind": score(mean, y), "other": score(p, other),
            "spread": float(p.std(0, unbiased=False).mean()) / wide if wide > 0 else 1.0}  # fmt: skip


def entropy(t: Tensor) -> Tensor:
    """Return the mean entropy of binary targets, the lowest possible loss with soft targets."""
    return -(torch.xlogy(t, t) + torch.xlogy(1 - t, 1 - t)).mean()


def same(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors hold the same values, in whatever shape and type."""
    if address_of(x) == address_of(y):
        return True
    x, y = x.detach().flatten(), y.flatten()
    if x.is_floating_point() and y.is_floating_point() and x.dtype != y.dtype:  # `batch.float()` of numpy's doubles
        x = x.to(y.dtype)
    return bool((to_double(x) == to_double(y)).all())


def part(x: Tensor, target: Tensor) -> bool:
    """Return whether a target is the beginning or the end of each row of an entry, for example the last steps of a window or its last columns."""
    if x.dim() != target.dim() or x.dim() < 2 or len(x) != len(target):
        return False
    if not target.is_floating_point() or x.shape == target.shape:
        return False
    if not x.is_floating_point() or any(t > n for t, n in zip(target.shape, x.shape, strict=True)):
        return False
    ways = [
        [slice(0, t)] if t == n else [slice(n - t, n), slice(0, t)] for t, n in zip(target.shape, x.shape, strict=True)
    ]
    return any(same(x[where], target) for where in product(*ways)) and bool(target.std() > 0)


def begins_like(given: Tensor, x: Tensor) -> bool:
    """Return whether a model's input holds the first step of an entry's rows: the known steps before those to be predicted."""
    if given.dim() != x.dim() or x.dim() < 3 or len(given) != len(x) or given.shape[2:] != x.shape[2:]:
        return False
    return bool(x[:, 0].std() > 0) and same(x[:, 0], given[:, 0])


def alike(x: Tensor, given: Tensor) -> bool:
    """Return whether a model's input is an entry of the batch, or that scaled and shifted as a whole."""
    if same(x, given.detach()):
        return True
    if not (x.is_floating_point() or x.dtype == torch.uint8) or x.numel() < 8:
        return False
    a, b = (to_double(v.detach().flatten()[:65536]) for v in (x, given))
    a, b = a - a.mean(), b - b.mean()
    return float((a * b).sum()) > 0.9999 * float(a.norm() * b.norm()) > 0


def r_squared(pairs: list[tuple[Tensor, Tensor]]) -> float | None:
    """Return R²: 1 minus the share of the targets' variance that the predictions leave."""
    if not pairs:
        return None
    p, y = (torch.cat([to_double(x.flatten()) for x in column]) for column in zip(*pairs, strict=True))
    wide = float(((y - y.mean()) ** 2).sum())
    return 1 - float(((p - y) ** 2).sum()) / wide if wide > 0 else None


def output_target_correlation(pairs: list[tuple[Tensor, Tensor]]) -> list[float]:
    """Return Pearson's correlation of outputs and targets, and the number of samples; empty if one of them is constant."""
    if not pairs:
        return []
    p, y = (torch.cat([to_double(x.flatten()) for x in column]) for column in zip(*pairs, strict=True))
    varied = bool(p.std() > 0) and bool(y.std() > 0)
    return [pearson(p, y), sum(len(x) for x, _ in pairs)] if varied else []


def beside(out: Any, leaves: Iterable[Any], given: tuple) -> tuple[Tensor, Tensor] | None:
    """Return a model's only output and the float entry of the batch of its size, unless that is the model's own input."""
    found = [x for x in floats(out) if x.dim()]
    if len(found) != 1 or found[0].numel() > 4096:
        return None
    homes = {address_of(x) for x in tensors(given)}
    fitting = [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point() and x.numel() == found[0].numel()]
    fitting = [x for x in fitting if address_of(x) not in homes and x.dim() and len(x) == len(found[0])]
    return (found[0].detach(), fitting[0].detach()) if len(fitting) == 1 else None


def binary_right(pairs: list[tuple[Tensor, Tensor]]) -> float | None:
    """Return the number of right answers for targets of 0 and 1. Outputs may be logits or probabilities."""
    rows = [(to_double(p.flatten()), to_double(y.flatten())) for p, y in pairs]
    if not rows or not all(bool(((y == 0) | (y == 1)).all()) for _, y in rows):
        return None
    p, y = (torch.cat(x) for x in zip(*rows, strict=True))
    cut = 0.5 if bool(((p >= 0) & (p <= 1)).all()) else 0.0
    return float(((p > cut) == (y > 0.5)).double().mean())
