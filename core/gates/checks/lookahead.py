"""Finds predictions that depend on the value that they must predict.

In sequence tasks the target is often the shifted input: the next token, the next values of a series. If input entry i and
target j are the same value, the model must not read i to predict j. If it does, it can also predict random, independent
sequences, and its score says nothing about the future.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from trainworthy.core.base import seeds
from trainworthy.core.base.modes import hooked
from trainworthy.core.gates.gate import fetch, pick
from trainworthy.core.loop.run import Run, evaluating
from trainworthy.core.recipe.stage import Data, Stage

SAMPLES = 16
DISTINCT = 4  # values that an entry must have among the samples: equal constants are no evidence
MATCHED = 0.9  # share of a target's entries that must equal the input where both exist
LONGEST = 1024  # positions; of longer sequences only shifts near both ends are tried
LIMIT = 1e-3  # of the effect of the target itself; healthy models: rounding
ROUNDING = 3e-6  # of the loss, in fp32
CALLS = 6  # calls of modules that are tried
GOALS = ("target", "targets", "label", "labels", "tgt", "goal", "goals")


@dataclass(frozen=True)
class Match:
    """Target entry j of `name` is input entry j + shift of a module's argument."""

    name: str
    module: str
    place: int
    """Index of the argument among the leaves of the module's arguments."""
    shift: int
    columns: tuple[tuple[int, int | None], ...]
    """(j, channel of the input) of each target entry that is in the input."""


def lookahead(run: Run, stage: Stage, data: Data, seed: int) -> tuple[float, str]:
    """Return (relative effect of a target's own value in the input on its prediction, where); (0, "") if no target is in
    the input. Each entry is tested by four losses: with the target as it is and changed, while the model reads the input
    as it is and changed. If the two changes do not add up, the prediction depends on its own target value."""
    n = min(stage.expect.at_most(SAMPLES), len(data))
    if n < DISTINCT or stage.expect.random_loss or stage.gates:
        return 0.0, ""  # a recipe's own gates compare the model's logits, place by place
    batch = fetch(data, pick(data, n, seed), seed, run.device)
    targets = {
        k: v for k, v in batch.items()
        if isinstance(v, Tensor) and v.dim() in (2, 3) and len(v) == n and k in data.fields and data.fields[k].role == "target"
    }  # fmt: skip
    if not targets:
        return 0.0, ""

    def value(stage: Stage, one: dict) -> float:
        seeds.seed_global(seed, "lookahead")
        return float(sum(stage.loss(stage.model, one).values()))

    with evaluating(stage.model), run.autocast():
        calls = _calls(stage, lambda: value(stage, batch), n)
    matches = [m for call in calls for m in _matches(call, targets)]
    if not matches:
        return 0.0, ""
    with evaluating(stage.model), run.autocast():
        return _worst(stage, batch, matches, value, ROUNDING if run.precision == "fp32" else 1e-2)


def _worst(
    stage: Stage, batch: dict, matches: list[Match], value: Callable[[Stage, dict], float], rounding: float
) -> tuple[float, str]:
    """Return the largest effect over the matches of the first call whose input can be replaced, and where it is."""
    for match in matches:
        found = _effect(stage, batch, match, value, rounding)
        if found is not None:
            return found
    return 0.0, ""


def _effect(
    stage: Stage, batch: dict, match: Match, value: Callable[[Stage, dict], float], rounding: float
) -> tuple[float, str] | None:
    """Return (relative effect, where), or None if no matched target is scored while the module's input is kept."""
    module = dict(stage.model.named_modules())[match.module]
    target = batch[match.name]
    with _given(module, match.place, None) as read:
        whole = value(stage, batch)
    if read[0] is None:
        return None
    source = read[0]

    def losses(j: int, channel: int | None) -> tuple[float, float, float]:
        """Loss of another target, of another input, and of both."""
        moved = source.clone()
        place = (slice(None), j + match.shift) + (() if channel is None else (channel,))
        moved[place] = source[place].roll(1, 0)
        other = target.clone()
        other[:, j] = _another(target[:, j])
        rows = {**batch, match.name: other}
        with _given(module, match.place, source):
            goal = value(stage, rows)
        with _given(module, match.place, moved):
            return goal, value(stage, batch), value(stage, rows)

    def scored(j: int) -> bool:
        other = target.clone()
        other[:, j] = _another(target[:, j])
        with _given(module, match.place, source):
            return abs(value(stage, {**batch, match.name: other}) - whole) > 10 * rounding * abs(whole)

    ends = (match.columns[i] for i in (len(match.columns) // 2, -1, 0))  # and a place within the sequence
    columns = [c for c in dict.fromkeys(ends) if scored(c[0])]
    if not columns or (match.shift == 0 and scored(0)):
        return None  # none of its entries is scored here; or the model reconstructs its input
    worst, where = 0.0, ""
    for j, channel in columns:
        goal, given, both = losses(j, channel)
        own, mixed = abs(goal - whole), abs(both - given - goal + whole)
        effect = mixed / own if mixed > 10 * rounding * abs(whole) else 0.0
        if effect >= worst:
            worst = effect
            where = f"'{match.name}' at {j} is entry {j + match.shift} of what {match.module or 'the model'} reads"
    return worst, where


def _another(column: Tensor) -> Tensor:
    """Return other values: of floats moved by their spread, of ids another sample's. Ignored ids (-100) stay."""
    if column.is_floating_point():
        return column + column.std().clamp_min(1e-6)
    other = column.clone()
    live = (column >= 0).nonzero().flatten()
    other[live] = column[live].roll(1, 0)
    return other


# ------------------------------------------------------------------------------------------- what the model was given
@dataclass
class _Call:
    module: str
    tensors: dict[int, Tensor]


def _calls(stage: Stage, ask: Callable[[], float], n: int) -> list[_Call]:
    """Return the first calls of the model and of its modules with tensors (n, T) or (n, T, C) that are not targets by name."""
    found: list[_Call] = []

    def listen(name: str) -> Callable:
        def hook(_module: nn.Module, args: tuple, kwargs: dict) -> None:
            if len(found) < CALLS and all(c.module != name for c in found):
                leaves = tree_flatten((args, kwargs))[0]
                goals = {id(v) for k, v in _by_name(args, kwargs) if k.lower() in GOALS}
                fit = {i: v.detach().clone() for i, v in enumerate(leaves)
                       if isinstance(v, Tensor) and v.dim() in (2, 3) and len(v) == n and v.shape[1] > 1 and id(v) not in goals}  # fmt: skip
                if fit:
                    found.append(_Call(name, fit))

        return hook

    named = stage.model.named_modules()
    with hooked(m.register_forward_pre_hook(listen(name), with_kwargs=True) for name, m in named):
        ask()
    return found


def _by_name(args: tuple, kwargs: dict) -> list[tuple[str, Any]]:
    """Return (name, value) of keyword arguments and of the entries of dictionaries."""
    rows = list(kwargs.items())
    for value in (*args, *kwargs.values()):
        if isinstance(value, dict):
            rows += [(str(k), v) for k, v in value.items()]
    return rows


@contextlib.contextmanager
def _given(module: nn.Module, place: int, tensor: Tensor | None) -> Iterator[list[Tensor | None]]:
    """Give the module `tensor` as its argument `place` (None: leave it as it is), and record what it was given first."""
    read: list[Tensor | None] = [None]

    def hook(_module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        leaves, spec = tree_flatten((args, kwargs))
        if place >= len(leaves) or not isinstance(leaves[place], Tensor):
            return None
        if read[0] is None:
            read[0] = leaves[place].detach().clone()
        if tensor is None or leaves[place].shape != tensor.shape:
            return None
        leaves[place] = tensor
        return tree_unflatten(leaves, spec)

    with module.register_forward_pre_hook(hook, with_kwargs=True):
        yield read


# ------------------------------------------------------------------------------------- which target is in which input
def _matches(call: _Call, targets: dict[str, Tensor]) -> list[Match]:
    """Return where an entry of the batch is the module's input, moved to later places by a constant shift (or by none)."""
    found = []
    for place, given in call.tensors.items():
        for name, target in targets.items():
            if torch.bool in (given.dtype, target.dtype) or given.is_floating_point() != target.is_floating_point():
                continue
            for goal, source, channel in _channels(target, given):
                columns = next(
                    (c for s in _shifts(goal.shape[1], source.shape[1]) if (c := _equal(goal, source, s))), ()
                )
                if columns:
                    shift = columns[0][1]
                    found.append(Match(name, call.module, place, shift, tuple((j, channel) for j, _ in columns)))
                    break
    return found


def _channels(target: Tensor, given: Tensor) -> Iterator[tuple[Tensor, Tensor, int | None]]:
    """Yield (target (N, T), input (N, T), channel of the input)."""
    goal = target[..., 0] if target.dim() == 3 else target
    if goal.shape[1] < 1:
        return
    if given.dim() == 2:
        yield goal, given, None
    else:
        for c in range(min(given.shape[2], 64)):
            yield goal, given[..., c], c


def _shifts(goal: int, given: int) -> list[int]:
    """Return the shifts that are tried: no negative one, because the past may be read."""
    every = range(given)
    return list(every) if given <= LONGEST else [*every[:8], *every[-goal - 8 :][:LONGEST]]


def _equal(goal: Tensor, given: Tensor, shift: int) -> tuple[tuple[int, int], ...]:
    """Return (j, shift) of the target entries that equal the input `shift` places on; none if too few of them do."""
    width = min(goal.shape[1], given.shape[1] - shift)
    if width < 1 or (shift and width == goal.shape[1] > 1 and not goal.is_floating_point()):
        return ()  # all ids are in the input, behind a start token: a text that is to be copied or corrected
    a, b = goal[:, :width], given[:, shift : shift + width]
    live = a >= 0 if not a.is_floating_point() else torch.ones_like(a, dtype=torch.bool)
    if not live.any() or ((a == b) | ~live).float().mean() < MATCHED or (a == b)[live].float().mean() < MATCHED:
        return ()
    return tuple(
        (j, shift) for j in range(width)
        if bool(((a == b) | ~live)[:, j].all()) and len(a[live[:, j], j].unique()) >= DISTINCT
    )  # fmt: skip
