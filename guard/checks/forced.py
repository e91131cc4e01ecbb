"""Finds series whose answer a model gets as an input, at the place where it gives it: by the gradient of its outputs."""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from trainworthy.core.base.verdict import Fault
from trainworthy.guard.checks.causality import SEEN, Again, arguments, exchanged_at, gradient, moved_at
from trainworthy.guard.hooks.trees import floats, tensors
from trainworthy.guard.measures.losses.targets import is_tokens

# Names of what a decoder is forced with
ANSWERS = re.compile(r"(?i)target|label|tgt|trg|truth|future|^y$|^y_|_y$|^dec")


def fault(seen: Any) -> Fault | None:
    """Call the model again that got its target. A decoder that reads the steps before each one has no gradient at that step itself, and a
    model that encodes the whole target has one at later steps, too."""
    one = seen.evidence.regression
    if one.chosen is not None and seen.control is not None and (found := at_its_place(*one.chosen)):
        return found
    if one.with_target is None or seen.control is None:
        return None
    module, args, kwargs, target, held = one.with_target
    return next((f for x in held if (f := seen_through(module, args, kwargs, target, x))), None)


def seen_through(module: nn.Module, args: tuple, kwargs: dict, target: Tensor, x: Tensor) -> Fault | None:
    """Find an answer that follows the input `x`, which holds it, at its own place."""
    if x.shape == target.shape:
        if not any(v is x and ANSWERS.search(name) for name, v in arguments(module, args, kwargs).items()):
            return None
        first = gradient(module, (args, kwargs), x, outputs(target, 1))
        if first is None or not bool(first[:, 0].any()) or bool(first[:, 1:].any()):
            return None
        return (
            "in training the model gets the target of each step as an input, and its answer of that step follows it",
            "the decoder's input is one step late: it gets the value that it must predict, and not the one before",
        )
    end = gradient(module, (args, kwargs), x, outputs(target, target.shape[1]))
    if end is None or not bool(end[:, -1].any()):
        return None
    return (
        f"the {target.shape[1]} steps to predict are the last ones of the model's input of {x.shape[1]} steps, and it reads them",
        "the window to predict begins where the input ends: the slice of the target lacks the length of the input",
    )


def at_its_place(module: nn.Module, args: tuple, kwargs: dict, x: Tensor) -> Fault | None:
    """Find the one output in the form of the input `x` (N, T, F), whose steps are the targets, if it follows the step that it must predict, and
    none behind it. A model that rebuilds a series follows all of it, or each step alone."""
    place, shapes = x.shape[1] // 2, []

    def pick(out: Any) -> list[Tensor]:
        shapes.extend(found := [y for y in tensors(out) if y.shape == x.shape])
        return [y[:, place] for y in found]

    follows = gradient(module, (args, kwargs), x, pick)
    if follows is None or len(shapes) != 1:
        return None
    before, own, behind = (float(x.abs().max()) for x in follows.tensor_split([place, place + 1], 1))
    if not (before and own) or behind > min(0.01 * own, 0.2 * before):  # a padded step may see all others
        return None
    return (
        "each target is a step of the model's own input, and the answer of a step follows that same step",
        "the answer is read one token too late, where the model has seen it (the action is predicted from the state, not from the action itself)",
    )


def outputs(target: Tensor, count: int) -> Callable[[Any], list[Tensor]]:
    """Return what picks the first `count` steps of the outputs that are compared with a target."""

    def pick(out: Any) -> list[Tensor]:
        return [y[:, :count] for y in tensors(out) if y.shape == target.shape]

    return pick


def copied(seen: Any) -> Fault | None:
    """Find a language model that computes its own loss and gets the same tokens as input and as target: the loss of a place follows the token
    that it reads there, and those before it do not. Models that shift the target themselves follow earlier tokens alone; an autoencoder's
    losses follow all of them."""
    for module, args, kwargs in seen.several.values() if seen.control is not None else ():
        ids = [(k, x) for k, x in arguments(module, args, kwargs).items() if is_tokens(x)]
        targets = [x for k, x in ids if ANSWERS.search(k) and k != "labels"]
        inputs = [x for k, x in ids if not ANSWERS.search(k)]
        own = next((x for x in inputs if any(x is not y and torch.equal(x, y) for y in targets)), None)
        if own is None or min(own.shape) < 4:
            continue
        call = Again(
            module, args, kwargs, own, lambda out, own=own: next((y for y in floats(out) if y.shape == own.shape), None)
        )
        if all(_copies(call, axis) for axis in (0, 1)):  # of time and of samples, in either order
            return (
                "the model gets the same tokens as input and as target, and the loss of a place follows the token that it reads there",
                "the target is not shifted by one: the model copies its input (tokens[1:] is the target of tokens[:-1])",
            )
    return None


def _copies(call: Again, axis: int) -> bool:
    place = call.place.shape[axis] // 2
    other = exchanged_at(call.place.clone(), call.place, axis, place)
    if torch.equal(other, call.place) or (answers := call.answers(other)) is None:
        return False
    own, early = moved_at(answers[0], answers[1], axis, place)
    return own > SEEN > early
