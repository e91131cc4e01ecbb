"""Plain records of passes, optimisers and schedulers, and small measurements on tensors for `observer`."""

import contextlib
import hashlib
import math
import os
import re
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from trainworthy.core.base.clock import now
from trainworthy.guard import HOME
from trainworthy.guard.hooks.addresses import home_of
from trainworthy.guard.hooks.trees import tensors

CLOSE = 8  # backward passes, steps and calls of each phase that are measured in detail
NORMS = (nn.modules.batchnorm._BatchNorm,)
DROPS = (nn.modules.dropout._DropoutNd,)


@dataclass
class Pass:
    """One iterator of one loader."""

    loader: DataLoader
    length: int | None
    started: int
    """Optimiser steps before it."""
    number: int = 0
    """Passes before it."""
    got: int = 0
    calls: int = 0
    no_grad_calls: int = 0
    backwards: int = 0
    steps: int = 0
    ended: bool = False
    was_cut: bool = False
    order: list[int] = field(default_factory=list)
    modes: list[tuple[int, bool, int, int]] = field(default_factory=list)
    """Per model call: id of the module, whether it was in train mode, active dropouts, batch norms in train mode."""
    refreshing: bool = False
    right: int = 0
    right_batch: int = 0
    seen: int = 0
    answers: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Of an evaluation: true and predicted classes."""
    pairs: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Of an evaluation: a model's output and the entry of the batch of its size."""
    prints: list[int] = field(default_factory=list)
    recent: deque = field(default_factory=lambda: deque(maxlen=4))
    """The last batches, because some loops fetch batches ahead."""
    held: Any = None
    """Weak reference to the iterator: its workers must end when the script drops it."""
    clock: float = field(default_factory=now)
    ahead: bool = False
    """The loop had drawn several batches before it called a model (Accelerate, prefetching): the newest is not the one in use."""

    @property
    def source(self) -> Any:
        return None if self.held is None else self.held()

    @source.setter
    def source(self, iterator: Any) -> None:
        self.held = None if iterator is None else weakref.ref(iterator)

    def left(self, other: Any) -> bool:
        """Return whether the loop over this iterator has ended, now that `other` is drawn from."""
        gone = self.held is not None and self.source in (None, other)
        return gone or 0 < self.calls == self.no_grad_calls

    @property
    def training(self) -> bool:
        return self.backwards > 0


Call = tuple[int, bool, int, int]
"""A call of a model: its id, whether it is in train mode, what dropout dropped, layers with batch statistics."""


class Gaps(list[list[Call]]):
    """The model calls without gradients between optimiser steps."""

    LARGE = 2
    """A call on this many times the samples of a training batch evaluates a whole split at once."""

    def __init__(self) -> None:
        super().__init__([[]])
        self.batch = 0
        self.large: set[int] = set()

    def trained(self, given: tuple) -> None:
        """Record that a model was called with gradients."""
        self.batch = max(self.batch, samples_of(given))

    def called(self, row: Call, given: tuple) -> None:
        """Record that a model was called without gradients."""
        self[-1].append(row)
        if 0 < self.LARGE * self.batch <= samples_of(given):
            self.large.add(len(self) - 1)

    def usual(self) -> int:
        """Return the median number of calls between two steps."""
        return sorted(len(g) for g in self)[len(self) // 2]

    def evaluations(self) -> list[int]:
        """Return the steps after which a model was called more often than usual."""
        least = self.usual() + 2
        return [i for i, g in enumerate(self) if i and len(g) >= least]

    def whole(self) -> list[int]:
        """Return the steps after which a model was called on far more samples than a batch has: two or more, where most steps have no
        calls without gradients."""
        found = sorted(i for i in self.large if i)
        return found if len(found) >= 2 and not self.usual() else []


def samples_of(given: tuple) -> int:
    """Return the length of the first tensor in a call's arguments."""
    return next((len(x) for x in tensors(given) if x.dim()), 0)


@dataclass
class Group:
    """One optimiser."""

    ref: Any
    frozen: set[int]
    """Ids of its parameters that did not require a gradient when it was built."""
    asleep: set[int]
    """The same for all modules that existed then."""
    steps: int = 0
    span: tuple[int, int] = (0, 0)
    """Steps of the script before this optimiser's first and its last one."""
    closure: bool = False
    consumed: bool = False
    probe: list[Tensor] = field(default_factory=list)
    marks: list[Tensor] = field(default_factory=list)
    """Some gradients of the last step."""
    stale: int = 0
    looked: int = 0
    """Steps whose gradients were compared: all in a rehearsal, some in a whole run."""
    empty: int = 0
    flat: int = 0
    """Of these: steps whose parameters had gradients, all of them exactly zero."""
    reached: int = 0
    """`backward()` calls, of the first ones, after which its parameters had a gradient other than zero."""
    last_live: int = 0
    """Number of the last step whose parameters had a gradient other than zero."""
    twice: int = 0
    zero: set[int] = field(default_factory=set)
    """Parameters whose gradient was exactly zero at every one of the first steps."""
    silent: int = 0
    """Of the first steps: those without a gradient whose loss was exactly zero."""
    backwards: int = 0
    windows: list[int] = field(default_factory=list)
    received: set[int] = field(default_factory=set)
    nonfinite: int = 0
    rates: list[float] = field(default_factory=list)
    built: tuple[float, ...] = ()
    """Rates of its parameter groups when it was built."""
    levelled: int = 0
    """Steps at which all of them had one rate, though they were built with several."""
    moved: dict[int, list[float]] = field(default_factory=dict)
    frozen_moved: set[int] = field(default_factory=set)
    clipped: list[str] = field(default_factory=list)
    scaled: bool = False
    unscaled: bool = False
    before: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    held: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @property
    def parameters(self) -> list[Tensor]:
        it = self.ref()
        return [] if it is None else [p for g in it.param_groups for p in g["params"]]


@dataclass
class Sched:
    """One learning-rate scheduler."""

    it: Any
    optimizer: Any
    place: tuple[str, int] = ("", 0)
    """File and line of the script that built it."""
    placed: bool = False
    """Its step() gets the epoch as an argument, so it does not count its calls."""
    at: list[tuple[int, int]] = field(default_factory=list)
    """For each of its steps: optimiser steps so far, and model calls without gradients since the last one."""


def values(p: Tensor) -> Tensor | None:
    """Return the entries of a gradient, dense or sparse."""
    return p.grad.coalesce().values() if p.grad is not None and p.grad.is_sparse else p.grad


def alive(p: Tensor) -> bool:
    """Return whether it has a non-zero gradient."""
    g = values(p)
    return g is not None and bool(g.any())


def spots(p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Up to 512 entries with the largest gradients, and their values."""
    grad, where = p.grad.detach().flatten().abs().topk(min(512, p.numel()))
    where = where[grad > 1e-3 * grad[0]]
    return p, where, p.detach().flatten()[where].clone()


def fingerprint(batch: Any) -> int:
    """Return a number that is equal for equal batches."""
    found = [x.detach().cpu().contiguous() for x in tensors(batch) if x.numel()]
    whole = hashlib.blake2b(digest_size=7)
    for x in found[:8]:
        whole.update(str(tuple(x.shape)).encode() + x.flatten()[:16384].view(torch.uint8).numpy().tobytes())
    return int.from_bytes(whole.digest(), "big") if found else 0


EPOCHS = re.compile(r"(?i)(n|num|max|total|train)?_?(train|training)?_?epochs")
STEPS = re.compile(r"(?i)(n|num|max|total|train)_?(train|training)?_?(iters?|iterations|steps|updates)")
RATE = re.compile(r"(?i)lr|rate|sched|warm|cosine|anneal|decay")
SETTINGS = ("args", "opt", "opts", "cfg", "config", "conf", "hparams", "params", "self")


def written() -> int:
    """How much has been printed so far; 0 where the output is no file."""
    sys.stdout.flush()
    try:
        return os.lseek(1, 0, os.SEEK_CUR)
    except OSError:
        return 0


def own_frames(frame: Any) -> Iterator[Any]:
    """Yield the script's frames, the innermost first."""
    while frame is not None:
        if "site-packages" not in frame.f_code.co_filename and not frame.f_code.co_filename.startswith(HOME):
            yield frame
        frame = frame.f_back


def scopes_of(frame: Any) -> list[dict]:
    """Return the variables of the script's frames, and of the settings that they hold."""
    found = []
    for own in own_frames(frame):
        for scope in (own.f_locals, own.f_globals):
            held = [v for k, v in list(scope.items()) if isinstance(k, str) and k.lower() in SETTINGS]
            found += [scope, *(vars(v) for v in held if hasattr(v, "__dict__"))]
            found += [v for v in held if isinstance(v, dict)]
    return found


def named(scopes: list[dict], pattern: re.Pattern) -> int:
    """Return the largest whole number that the script's own variables name (`EPOCHS`, `args.max_steps`); 0 if none does."""
    held = ((k, v) for scope in scopes for k, v in list(scope.items()) if isinstance(k, str) and type(v) is int)
    return max((v for k, v in held if pattern.fullmatch(k)), default=0)


def rate_functions(scopes: list[dict]) -> list[Callable]:
    """Return functions of the script that may compute a rate from the number of a step."""
    found = {
        id(v): v
        for scope in scopes
        for k, v in list(scope.items())
        if isinstance(k, str)
        and RATE.search(k)
        and type(v).__name__ == "function"
        and v.__code__.co_argcount - len(v.__defaults__ or ()) == 1
    }
    return list(found.values())[:8]


def bare(module: nn.Module) -> nn.Module:
    """Return the module inside DistributedDataParallel, whose call would wait for the other processes."""
    return module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module


def pretrained(module: nn.Module | None) -> bool:
    """Return whether a library reports that this model's weights were loaded."""
    config = getattr(module, "config", None)
    return bool(getattr(config, "_name_or_path", ""))


def on_gradient(x: Tensor, function: Callable[[Tensor], None]) -> None:
    """Call `function` with the gradient of `x` when it is known. An error in it does not reach the script."""

    def hook(grad: Tensor) -> None:
        with contextlib.suppress(Exception):
            function(grad.detach())

    x.register_hook(hook)


def point(target: Tensor, given: tuple) -> list[tuple[Tensor, Tensor]]:
    """Return the model's first input as vectors, at most 256 entries wide (tokens: counts), with the class targets."""
    if target.dim() != 1 or target.is_floating_point():
        return []
    for x in given:
        if not isinstance(x, Tensor) or x.dim() < 2 or len(x) != len(target):
            continue
        if x.is_floating_point():
            rows = x.detach().flatten(1)
            return [(rows[:, :: max(1, rows.shape[1] // 256)].float().cpu(), target.cpu())]
        if x.dtype == torch.int64 and int(x.min()) >= 0 and int(x.max()) < 4096:
            return [(torch.zeros(len(x), 4096).scatter_add_(1, x.cpu(), torch.ones(x.shape)), target.cpu())]
    return []


def logits_of(out: Any) -> Tensor | None:
    """Return the (N, C) scores among a model's outputs."""
    for x in (out, getattr(out, "logits", None), *(out[:1] if isinstance(out, (tuple, list)) else ())):
        if isinstance(x, Tensor) and x.dim() == 2 and x.shape[1] > 1 and x.is_floating_point():
            return x
    return None


def class_target(batch: Any, out: Any) -> Tensor | None:
    """Return the class targets of a batch that fit a model's (N, C) output."""
    logits = logits_of(out)
    if logits is None:
        return None
    found = [x for x in tensors(batch) if x.dtype == torch.int64 and x.shape == logits.shape[:1]]
    found = [x for x in found if len(x) and int(x.min()) >= 0 and int(x.max()) < logits.shape[1]]
    return found[-1].to(logits.device) if found else None


def used(batches: deque, given: tuple) -> Any:
    """Return the batch whose tensors a model was called with; None if it used none of them unchanged."""
    inputs = tensors(given)
    homes = {home_of(x) for x in inputs}
    for batch in reversed(batches):
        if any(home_of(x) in homes for x in tensors(batch)):
            return batch
    for batch in reversed(batches):  # a copy, on another device or of another type
        if any(x.shape == t.shape and bool((x.to(t) == t).all()) for x in tensors(batch) for t in inputs):
            return batch
    return None


def current(one: Pass, given: tuple) -> Any:
    """Return the batch that a model was called with. If its inputs are none of a batch's, that is the newest one; None if the loop
    fetches ahead."""
    found = used(one.recent, given)
    return one.recent[-1] if found is None and one.recent and not one.ahead else found


VIEWS = ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0")
TAKES_PLACES = (nn.Linear, nn.LayerNorm, nn.RNNBase, nn.MultiheadAttention, nn.TransformerEncoderLayer)


def scrambled(module: nn.Module, given: Any) -> str:
    """Return how a view() or reshape() made places (B, T, F) of a tensor whose axis of length T is not the next one: it mixes
    places and channels. Empty where a view may mean T: a part of the next axis, or the next axes together."""
    x = next((v for v in given if isinstance(v, Tensor)), None) if isinstance(module, TAKES_PLACES) else None
    if x is None or x.dim() != 3 or x.grad_fn is None or x.grad_fn.name() not in VIEWS:
        return ""
    old = tuple(int(n) for n in x.grad_fn._saved_self_sym_sizes)  # type: ignore[attr-defined]
    places = x.shape[1]
    if len(old) not in (3, 4) or old[0] != len(x) or places < 3 or x.shape[2] < 2:
        return ""
    inner = old[1:]
    meant = {math.prod(inner[:i]) for i in range(len(inner) + 1)}
    later = {math.prod(inner[i:j]) for i in range(1, len(inner)) for j in range(i + 1, len(inner) + 1)}
    if places in meant or inner[0] % places == 0 or places not in later:
        return ""
    return f"{type(module).__name__} gets {tuple(x.shape)} as a view of {old}"


def unintended(drops: int, module: nn.Module) -> int:
    """Return the number of dropouts in a call, or 0 where a model in eval mode has dropout layers that somebody has set to train mode
    (Monte-Carlo dropout): `eval()` sets them all."""
    if drops and not module.training and any(isinstance(m, DROPS) and m.training and m.p > 0 for m in module.modules()):
        return 0
    return drops


SHARDED = ("FlatParameter", "DTensor")
PARAMETERS, VALUES = 24, 32


def weights(groups: list[Group]) -> list[list[float]] | None:
    """Return the first values of the first parameters of every optimiser; None where each rank holds another part."""
    found = []
    for group in groups:
        for p in group.parameters[:PARAMETERS]:
            if type(p).__name__ in SHARDED or hasattr(p, "_local_tensor"):
                return None
            found.append(p.detach().flatten()[:VALUES].cpu().double().tolist())
    return found
