"""Looks at the scores that a loss gives to softmax: which samples they compare, and whether their range is enough for the loss to fall."""

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

CROSS_ENTROPY = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
LARGER = 10.0  # times the weights
BOUND = 2.0  # times the range of scores that larger weights give, if nothing bounds it
NEAR = 1.25  # times the lowest loss of a range of scores, from which that range explains the loss
OVER = {F.cross_entropy, F.log_softmax, F.softmax, torch.log_softmax, torch.softmax, torch.logsumexp, Tensor.log_softmax, Tensor.softmax,
        Tensor.logsumexp}  # fmt: skip


class Scores(TorchFunctionMode):
    """Keeps (scores, class numbers or None) of each call while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Tensor, Tensor | None]] = []

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        given = kwargs or {}
        if func in OVER and isinstance(scores := args[0] if args else given.get("input"), Tensor):
            target = (args[1] if len(args) > 1 else given.get("target")) if func is F.cross_entropy else None
            classes = isinstance(target, Tensor) and not target.is_floating_point()
            self.seen.append((scores.detach(), target.detach() if classes else None))
        return func(*args, **given)


class Axes(TorchFunctionMode):
    """Keeps (name, axis, size of the axis) of each softmax with an axis while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int, int]] = []

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        given = dict(zip(("input", "dim"), args, strict=False)) | (kwargs or {})
        scores, axis = given.get("input"), given.get("dim")
        if func in OVER and isinstance(scores, Tensor) and isinstance(axis, int):
            self.seen.append((func.__name__, axis % scores.dim(), scores.shape[axis]))
        return func(*args, **(kwargs or {}))


class Smoothed(TorchFunctionMode):
    """Notes cross-entropies with smoothed labels while it is active. `ideal`: puts scores in the place of theirs that fit the smoothed
    labels best (True), or a loss of 0 in the place of theirs (False)."""

    def __init__(self, ideal: bool | None = None) -> None:
        super().__init__()
        self.ideal, self.found = ideal, False

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        given = kwargs or {}
        if func is not F.cross_entropy:
            return func(*args, **given)
        given = dict(zip(CROSS_ENTROPY, args, strict=False)) | given
        if not (smoothing := given.get("label_smoothing", 0.0)):
            return func(**given)
        if given["target"].is_floating_point() or given.get("weight") is not None:
            return func(**given)
        self.found = True
        if self.ideal is None:
            return func(**given)
        scores, axis = given["input"], int(given["input"].dim() > 1)  # (C,), or (B, C, ...)
        n, own = scores.shape[axis], given["target"].clamp(0, scores.shape[axis] - 1).unsqueeze(axis)
        best = torch.full_like(scores, math.log(smoothing / n)).scatter(
            axis, own, math.log(1 - smoothing + smoothing / n)
        )
        due = func(**given | {"input": best})
        return due if self.ideal else 0 * due


def smoothed_floor(loss: Callable[[], Tensor]) -> float:
    """Return the part of `loss()` that smoothed labels leave at the best scores: the entropy of the smoothed labels, as the loss weighs it."""
    both = []
    for ideal in (True, False):
        with Smoothed(ideal):
            both.append(loss().item())
    return both[0] - both[1]


@contextlib.contextmanager
def noted_ranges(model: nn.Module) -> Iterator[list[float]]:
    """Yield a list that gets the range (largest minus smallest number) of each output of `model`: a tensor, or those of a mapping."""
    found: list[float] = []

    def note(_module: nn.Module, _args: Any, out: Any) -> None:
        for one in out.values() if isinstance(out, Mapping) else [out]:
            if isinstance(one, Tensor) and one.is_floating_point() and one.numel():
                found.append((one.max() - one.min()).item())

    with model.register_forward_hook(note):
        yield found


def explain_in_batch(loss: Callable[[int], object]) -> tuple[str, str]:
    """(what the loss compares, the fault in it) where it compares each sample with the others of its batch, as contrastive losses do:
    scores of n samples with n others. `loss(n)`: computes the loss of n samples, for n of 3 and 4."""
    found = []
    for n in (3, 4):
        with Scores() as scores:
            loss(n)
        found.append([s for s in scores.seen if s[0].dim() == 2 and {*s[0].shape} <= {n, 2 * n, 2 * n - 1}])
    if not all(found):
        return "", ""
    rows, columns = found[1][0][0].shape
    what = f"the loss compares the samples of a batch: softmax over scores of {rows} x {columns} for four samples"
    for scores, target in found[1]:
        if target is None or scores.shape != (4, 4) or target.shape != (4,):
            continue
        if target.unique().numel() == 4 and (own := target.tolist()) != [0, 1, 2, 3]:
            row = next(i for i, c in enumerate(own) if i != c)
            return what, (f"each sample is matched with another sample's view: of four samples, the target of row {row} is column {own[row]}; "
                          "targets are torch.arange(len(batch))")  # fmt: skip
    return what, ""


def explain_bounded_scores(model: nn.Module, loss: Callable[[nn.Module], object], reached: float, needed: float) -> str:
    """Return that the range of scores keeps the loss of a sample above `needed`: they are bounded, and `reached` is about what that range
    allows. `loss(model)`: computes the loss of a batch."""
    first = _range(model, loss)
    if first is None:
        return ""
    low, high, classes = first
    least = math.log1p((classes - 1) * math.exp(low - high))
    if least <= needed or not reached <= NEAR * least:
        return ""
    larger = copy.deepcopy(model)
    with torch.no_grad():
        for weight in larger.parameters():
            weight.mul_(LARGER)
    again = _range(larger, loss)
    if again is None or not 0 < again[1] - again[0] < BOUND * (high - low):
        return ""
    return (f"the scores are bounded: they lie between {low:.3g} and {high:.3g}, with {LARGER:g} times the weights between {again[0]:.3g} and "
            f"{again[1]:.3g}; a loss over {classes} scores in such a range is at least {least:.3g}. Cosines need a factor (10 to 100), and a "
            "temperature divides: 0.1, not 10")  # fmt: skip


def _range(model: nn.Module, loss: Callable[[nn.Module], object]) -> tuple[float, float, int] | None:
    """(smallest, largest score, number of scores of a row) of the only loss over softmax, or None."""
    with Scores() as scores, torch.no_grad():
        loss(model)
    found = [s for s, target in scores.seen if target is not None and s.dim() == 2]
    if len({s.shape for s in found}) != 1 or not all(s.isfinite().all() for s in found):
        return None
    return min(s.min().item() for s in found), max(s.max().item() for s in found), found[0].shape[1]
