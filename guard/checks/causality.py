"""Calls a model again, after the rehearsal, with parts of its input changed: what it must not see, and what it must."""

import functools
import inspect
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from trainworthy.core.base.modes import in_mode
from trainworthy.core.base.seeds import kept_draws
from trainworthy.guard.checks.results import finding, skip
from trainworthy.guard.hooks.parameters import parameters_of
from trainworthy.guard.hooks.trees import first_float, floats, tensors
from trainworthy.guard.measures.data import interleaved
from trainworthy.guard.measures.losses import next_items
from trainworthy.guard.measures.losses.logits import classes_last
from trainworthy.guard.measures.losses.targets import fits, following, tokens_of
from trainworthy.guard.measures.models import rows as sample_rows
from trainworthy.guard.measures.records import bare, logits_of
from trainworthy.guard.source.skipped import skipped

# Names of what a model may read in some calls alone
GIVEN = re.compile(r"(?i)target|label|tgt|trg|mask|^y$|len|offset|idx|index|type|segment|size")
DEAD = "all units are dead (a rate that is far too high), or the model leaves its input out"
SELECTED = "samples are selected, scattered or averaged along the wrong axis"
SEEN = 1e-4  # mean change of the outputs, in units of their spread; healthy models give exactly 0


class Again:
    """Calls a model in eval mode with one input replaced."""

    def __init__(self, module: nn.Module, args: tuple, kwargs: dict, place: Tensor, pick: Callable):
        self.module, self.given, self.place, self.pick = bare(module), (args, kwargs), place, pick

    def __call__(self, value: Tensor) -> Tensor | None:
        args, kwargs = replaced(self.given, self.place, value)
        try:
            with in_mode(self.module, training=False), torch.no_grad():
                return self.pick(self.module(*args, **kwargs))
        except Exception:
            return None

    def answers(self, *values: Tensor) -> list[Tensor] | None:
        """Return the outputs for the input itself, then for `values`; None where the model is random or cannot be called."""
        first, *others = (self(x) for x in (self.place, self.place, *values))
        if first is None or any(y is None for y in others) or not torch.equal(first, others[0]):
            return None
        return [first, *others[1:]]


def replaced(given: Any, old: Tensor, new: Tensor) -> Any:
    """Return arguments with one tensor in place of another."""
    leaves, spec = tree_flatten(given)
    return tree_unflatten([new if x is old else x for x in leaves], spec)


def change(call: Again, value: Tensor, axis: int, half: int, *, early: bool) -> float | None:
    """Return how much the outputs in the early or late half change when the input of the other half does; None where
    the model is random or cannot be called."""
    first, again, other = call(call.place), call(call.place), call(value)
    if first is None or again is None or other is None or other.shape != first.shape:
        return None
    spread = float(first.float().std())
    if not spread > 0 or float((first - again).abs().max()) > 1e-4 * spread:
        return None
    start, size = (0, half) if early else (half, first.shape[axis] - half)
    return float((other - first).narrow(axis, start, size).float().abs().mean()) / spread


def follows_only_the_past(module: nn.Module, args: tuple, kwargs: dict, x: Tensor) -> bool:
    """Return whether an output follows the input at its own and at earlier places, and at no later one."""

    def same_shape(out: Any) -> Tensor | None:
        return next((y for y in tensors(out) if y.shape == x.shape), None)

    call = Again(module, args, kwargs, x, same_shape)
    for axis in (1, 0) if x.dim() > 2 else (1,):
        half = x.shape[axis] // 2
        late, early = x.clone(), x.clone()
        for y, start, size in ((late, half, x.shape[axis] - half), (early, 0, half)):
            part = y.narrow(axis, start, size)
            part.add_(torch.randn_like(part) * x.std())
        ahead = change(call, late, axis, half, early=True)
        behind = change(call, early, axis, half, early=False)
        if ahead is not None and behind is not None and ahead < 1e-6 and behind > 1e-3:
            return follows_own_place(call, axis, half)
    return False


def follows_own_place(call: Again, axis: int, place: int) -> bool:
    """Return whether an output follows the input at its own place. A decoder that is given its targets, and shifts them itself, does not."""
    value = call.place.clone()
    part = value.narrow(axis, place, 1)
    part.add_(torch.randn_like(part) * call.place.std())
    first, other = call(call.place), call(value)
    if first is None or other is None:
        return False
    moved = (other - first).narrow(axis, place, 1).float().abs().mean()
    return float(moved) > SEEN * float(first.float().std())


def scores_of(out: Any, ids: Tensor) -> Tensor | None:
    """Return a model's outputs for each token, (*ids.shape, C), also if it has them as (B, C, T)."""
    leaves = floats(out)
    found = [y for y in leaves if y.dim() > 1
             and y.numel() % ids.numel() == 0 and y.shape[-1] == y.numel() // ids.numel() > 1]  # fmt: skip
    if found:
        return found[0].reshape(*ids.shape, -1)
    return next((z for y in leaves if (z := classes_last(y, ids)) is not None), None)


def permuted(x: Tensor, axis: int, start: int) -> Tensor:
    """Return the tokens with those from `start` on exchanged with each other."""
    other = x.clone()
    part = other.narrow(axis, start, x.shape[axis] - start)
    part.copy_(part.flatten()[torch.randperm(part.numel(), device=part.device)].view(part.shape))
    return other


def exchanged_at(other: Tensor, ids: Tensor, axis: int, place: int) -> Tensor:
    """Put the tokens of the other samples into one place of `other`; return it."""
    other.narrow(axis, place, 1).copy_(ids.narrow(axis, place, 1).roll(1, 1 - axis))
    return other


def moved_at(first: Tensor, changed: Tensor, axis: int, place: int) -> tuple[float, float]:
    """Return how much outputs change at a place (mean) and before it (largest), in units of their spread."""
    difference = (changed - first).abs().float() / first.float().std().clamp_min(1e-12)
    return float(difference.narrow(axis, place, 1).mean()), float(difference.narrow(axis, 0, place).max())


def sees_the_same_place(seen: Any) -> bool | None:
    """Return whether the scores of a place follow the token at that place. A decoder that gets its targets and shifts them
    itself does not: there is an axis along which the first exchanged token leaves its own scores as they are."""
    if seen.copied is None or seen.control is None:
        return None
    module, args, kwargs = seen.copied
    ids = tokens_of(module, args, kwargs)
    if ids is None:
        return None
    call, found = Again(module, args, kwargs, ids, lambda out: scores_of(out, ids)), []
    for axis in (0, 1):
        half = ids.shape[axis] // 2
        if half:
            other = exchanged_at(permuted(ids, axis, half), ids, axis, half)
            if (answers := call.answers(other)) is None:
                return None
            first, changed = answers
            difference = (changed - first).narrow(axis, half, 1).abs().float().mean()
            found.append(float(difference) > SEEN * float(first.float().std()))
    return all(found) if found else None


def packed_copy(seen: Any) -> tuple[str, str] | None:
    """Find packed targets that are the model's own tokens, from the first one on, where the scores of a place follow its token. (After a
    picture in front of the tokens they do not.)"""
    if seen.evidence.packed.call is None or seen.control is None:
        return None
    module, args, kwargs, ids, sizes = seen.evidence.packed.call
    place = next((k for k in (2, 1) if k < len(sizes)), 0)
    count, start = int(sizes[place]), int(sizes[:place].sum())
    if not place or count < 2:
        return None

    def at_place(out: Any) -> Tensor | None:
        found = floats(out)
        flat = next((y[start : start + count] for y in found if y.dim() == 2 and len(y) == int(sizes.sum())), None)
        padded = (y[:, place] for y in found if y.dim() == 3 and len(y) == len(ids) and y.shape[1] > place)
        return flat if flat is not None else next(padded, None)

    other = ids.clone()
    other[:, place] = ids[:, place].roll(1)
    if torch.equal(other, ids):
        return None
    if (answers := Again(module, args, kwargs, ids, at_place).answers(other)) is None:
        return None
    first, changed = answers
    moved = float((changed - first).abs().float().mean()) / max(float(first.float().std()), 1e-12)
    if moved < SEEN:
        return None
    return (
        f"every packed target is the token that the model reads at the same position, and its scores follow it (by {moved:.2g} of their spread)",
        "the shift by one is missing: pack tokens[:, 1:] with lengths - 1 as the targets. The model copies its input",
    )


def sees_ahead(seen: Any) -> dict | None:
    """Check that a model whose targets are the next tokens does not see them."""
    if seen.shifted is None:
        return None
    module, args, kwargs, target, ids = seen.shifted
    if ids is None or min(ids.shape) < 1:
        return None
    axis = next((k for k, (x, y) in enumerate(following(ids, target)) if y is not None and fits(x, y, 1, -100)), None)
    if axis is None or ids.shape[axis] < 4:
        return None
    half = ids.shape[axis] // 2
    call = Again(module, args, kwargs, ids, lambda out: scores_of(out, ids))
    seen_ahead = change(call, permuted(ids, axis, half), axis, half, early=True)
    if seen_ahead is None or any(p.dtype in (torch.bfloat16, torch.float16) for p in parameters_of(module)):
        return None
    measured = f"scores change by {seen_ahead:.2g} of their spread when only later tokens do"
    cause = (
        "the model sees the tokens that it must predict: the causal mask is missing, on the wrong axis, or a view() or "
        "reshape() mixes positions"
    )
    return finding("dependency", measured, cause if seen_ahead > SEEN else "")


def gradient(module: nn.Module, given: tuple, x: Tensor, pick: Callable) -> Tensor | None:
    """Return the gradient by the input `x` of a random sum of the outputs that `pick` chooses, in eval mode; None where there is none."""
    inner, leaf = bare(module), x.detach().clone().requires_grad_(True)
    try:
        args, kwargs = replaced(given, x, leaf)
        with in_mode(inner, training=False), torch.backends.cudnn.flags(enabled=False), torch.enable_grad():
            out = [y for y in pick(inner(*args, **kwargs)) if isinstance(y, Tensor) and y.requires_grad]
            return torch.autograd.grad(sum((y * torch.randn_like(y)).sum() for y in out), leaf, allow_unused=True)[0]
    except Exception:
        return None


def ignores_samples(seen: Any) -> dict | None:
    """Check that the samples of a classifier's input reach its outputs."""
    if seen.classified is None:
        return None
    module, args, kwargs = seen.classified
    x = next((v for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.is_floating_point() and v.dim() > 1),
             None)  # fmt: skip
    if x is None or len(x) < 32:
        return None

    def classified(out: Any) -> list[Tensor]:
        scores = logits_of(out)
        return [scores] if scores is not None and len(scores) == len(x) else []

    grad = gradient(module, (args, kwargs), x, classified)
    if grad is None:
        return None
    without = int((grad.flatten(1) == 0).all(1).sum())
    measured = f"{len(x) - without} of {len(x)} samples of the input reach the outputs"
    cause = SELECTED if without > 0.8 * len(x) else ""
    return finding("dependency", measured, DEAD if without == len(x) else cause, symptom=without == len(x))


def ignores_places(seen: Any) -> dict | None:
    """Check that more than one place of a series (N, T, F) reaches the outputs that are compared with numbers."""
    if seen.fits.root is None:
        return None
    module, args, kwargs = seen.fits.root
    x = first_float(args, kwargs)
    if x is None or x.dim() != 3 or x.shape[1] < 4 or len(x) < 4:
        return None
    grad = gradient(module, (args, kwargs), x, tree_leaves)
    if grad is None:
        return None
    reach = (grad != 0).any(2).any(0)
    measured = f"{int(reach.sum())} of {len(reach)} positions of the input {tuple(x.shape)} reach the outputs"
    where = torch.nonzero(reach).flatten().tolist()
    cause = (
        "the output of another time step is read, or along another axis: out[:, -1] is meant" if where == [0] else ""
    )
    return finding("dependency", measured, cause)


def arguments(module: nn.Module, args: tuple, kwargs: dict) -> dict[str, Any]:
    """Return what a model was called with, by name."""
    try:
        return dict(inspect.signature(bare(module).forward).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):
        return {}


def unread(seen: Any) -> dict | None:
    """Check that every input of a model that differs between samples reaches an output: in train mode, with equal random draws, the
    outputs must not stay the same to the last bit when the input's rows are exchanged."""
    ignored, count = [], 0
    for module, args, kwargs in seen.several.values():
        for name, x in arguments(module, args, kwargs).items():
            varied = (
                isinstance(x, Tensor)
                and x.layout == torch.strided
                and x.dim() > 0
                and len(x) > 3
                and len(x.unique()) > 2
            )
            if not varied or GIVEN.search(name) or torch.equal(other := x.detach().roll(1, 0), x):
                continue
            found = [same_outputs(module, (args, kwargs), x, other, seed) for seed in range(3)]
            count += False in found
            call = functools.partial(drawn_alike, module, (args, kwargs), x, (x,), 0)
            if found == [True] * 3 and not skipped(bare(module).forward, name, call):
                ignored.append(f"input {name} {tuple(x.shape)} of {type(module).__name__} reaches no output")
    if not count:  # no input has an effect: the model returns something else
        return None
    measured = "; ".join(ignored) or f"{count} inputs of models with several reach the outputs"
    cause = "it is computed and never used, or another input is used in its place (copied code)" if ignored else ""
    return finding("dependency", measured, cause)


def same_outputs(module: nn.Module, given: tuple, x: Tensor, other: Tensor, seed: int) -> bool | None:
    """Return whether a model's outputs are the same with `other` in place of `x`; None where it cannot be called."""
    outs = drawn_alike(module, given, x, (x, other), seed)
    if outs is None or not outs[0] or len(outs[0]) != len(outs[1]):
        return None
    return all(torch.equal(a, b) for a, b in zip(*outs, strict=True))


def drawn_alike(
    module: nn.Module, given: tuple, x: Tensor, values: tuple[Tensor, ...], seed: int
) -> list[list[Tensor]] | None:
    """Return a model's outputs in train mode for each of `values` in place of `x`, with equal random draws; None where it cannot be called."""
    inner, outs = bare(module), []
    try:
        for value in values:
            args, kwargs = replaced(given, x, value)
            with kept_draws(), in_mode(inner, training=True), torch.no_grad():
                torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)
                outs.append([y.clone() for y in tensors(inner(*args, **kwargs))])
    except Exception:
        return None
    return outs


def sees_its_answer(seen: Any) -> dict | None:
    """Check a decoder that is given its targets, by teacher forcing: the scores of a place must not follow the target at that place.
    Earlier places must not follow it either, else the model reads whole rows on purpose (an autoencoder)."""
    if seen.answers is None:
        return None
    module, args, kwargs, ids = seen.answers
    found = []
    for axis in (0, 1):
        half = ids.shape[axis] // 2
        if not half:
            return None
        other = exchanged_at(ids.clone(), ids, axis, half)
        own, early = 0.0, 0.0
        for seed in range(6):  # one in 64 of decoders that are given half of their targets get none here
            outs = drawn_alike(module, (args, kwargs), ids, (ids, other), seed)
            scores = [scores_of(out, ids) for out in outs or ()]
            if len(scores) < 2 or scores[0] is None or scores[1] is None:
                return None
            here, before = moved_at(scores[0], scores[1], axis, half)
            own, early = max(own, here), max(early, before)
        found.append((own, early))
    own, early = min(own for own, _ in found), max(early for _, early in found)
    measured = f"scores of a position change by {own:.2g} of their spread with the target at that position"
    cause = "with teacher forcing the decoder gets the token that it must predict: give it the token before (SOS first)"
    return finding("dependency", measured, cause if own > SEEN and early < SEEN else "")


def orderless(seen: Any) -> dict | None:
    """Check that a model of masked tokens knows their order: its scores must not move with the tokens as they are exchanged."""
    if seen.masked is None:
        return None
    module, args, kwargs = seen.masked
    ids = tokens_of(module, args, kwargs)
    if ids is None or ids.shape[1] < 8:
        return None
    call = Again(module, args, kwargs, ids, lambda out: scores_of(out, ids))
    order = torch.randperm(ids.shape[1], generator=torch.Generator().manual_seed(0)).to(ids.device)
    half = ids.shape[1] // 2
    if (answers := call.answers(ids[:, order], permuted(ids, 1, half))) is None:
        return None
    first, moved, changed = answers
    spread = float(first.float().std())
    context = float((changed - first)[:, :half].float().abs().mean())
    left = float((moved - first[:, order]).float().abs().mean())
    measured = f"scores change by {left / max(spread, 1e-12):.2g} of their spread when the tokens change places and nothing else"
    if not context > 1e-3 * spread:
        return None
    cause = "the model does not know the positions of its tokens: position ids are constant, or the position embedding is not added"
    return finding("dependency", measured, cause if left < 0.02 * context else "")


def dependency(seen: Any) -> dict:
    """Check that in eval mode an output depends on its own sample alone, and never on later tokens."""
    rows = []
    if seen.scrambled:
        cause = "view() or reshape() where permute() or transpose() is meant: positions and channels are mixed"
        rows.append(finding("dependency", seen.scrambled, cause))
    if fault := interleaved.fault(seen.first_call):
        rows.append(finding("dependency", *fault))
    if fault := seen.evidence.masks.fault() or seen.evidence.views.fault():
        rows.append(finding("dependency", *fault))
    if seen.control is not None:  # nothing is computed again in a real run
        with torch.random.fork_rng(devices=[]):
            checks = (sees_ahead, sees_its_answer, ignores_samples, orderless, ignores_places, unread)
            rows += [found for check in checks if (found := check(seen)) is not None]
            rows += [finding("dependency", *found) for found in (*sample_rows.check(seen), *next_items.check(seen))]
    if not rows:
        return skip("dependency", "no evaluation by class in eval mode was seen, or a batch cannot be cut")
    bad = [r for r in rows if not r["ok"]] or rows
    return finding(
        "dependency", "; ".join(r["measured"] for r in bad), "\n".join(r["cause"] for r in bad if r["cause"])
    )
