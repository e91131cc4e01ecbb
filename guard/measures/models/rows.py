"""Which samples of a batch do the rows of a model's input belong to, and does an output depend on its own sample alone?

Views are read by their strides, so a view() or reshape() that cuts samples is found before the model is called. Outputs are
computed again, after the rehearsal, from half of a batch.
"""

import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from trainworthy.core.base.modes import hooked, in_mode
from trainworthy.core.base.seeds import kept_draws
from trainworthy.guard.hooks.addresses import home_of
from trainworthy.guard.hooks.parameters import parameters_of
from trainworthy.guard.hooks.trees import floats, tensors
from trainworthy.guard.measures.records import NORMS, bare

LOOKS, ENOUGH = 16, 4  # model calls whose inputs are read; of these, how many must agree
MOST = 2_000_000  # entries of a view
HALVES = 8  # models that are called again
MIXED = 0.05  # change of an output, in units of the outputs' spread
Call = tuple[nn.Module, tuple, dict, int]  # a model, its arguments, and the samples in them


class Rows:
    """Inputs that are views across samples, and a call of each model with a whole batch, in training and in evaluation."""

    def __init__(self) -> None:
        self.looks, self.crossed = 0, 0
        self.detail = ""
        self.calls: dict[int, Call] = {}
        self.columns: dict[int, Call] = {}  # calls whose inputs are time-first, (T, N, ...)
        self.scored: dict[int, Call] = {}  # calls in eval mode whose outputs are classified

    def root(self, module: nn.Module, args: tuple, kwargs: dict, batches: Iterable[list], size: int) -> None:
        """Note a model's call in training. `batches`: entries of the last batches; `size`: samples in one."""
        given = [x for x in tensors((args, kwargs)) if x.dim()]
        if self.looks < LOOKS:
            self.looks += 1
            leaves = [x for batch in batches for x in batch if isinstance(x, Tensor) and x.dim() > 1 and len(x) > 2]
            for g in given:
                if detail := next((t for x in leaves if (t := crossing(g.detach(), x.detach()))), ""):
                    self.crossed, self.detail = self.crossed + 1, detail
                    break
        known = id(module) in {*self.calls, *self.columns} or any(x.requires_grad for x in given)
        if known or len(self.calls) + len(self.columns) >= HALVES:
            return
        size = size or rows_of(given)
        if by_sample(given, size):
            self.calls[id(module)] = (module, args, kwargs, size)
        elif columns := columns_of(module, given):
            self.columns[id(module)] = (module, args, kwargs, columns)


def crossing(g: Tensor, x: Tensor) -> str:
    """Return how a model's input `g`, a view of the batch's entry `x`, gives the samples other rows than they have, or exchanges
    the lengths of their axes without moving entries; empty where it does not. A view may cut or join rows, but what has as many
    rows as there are samples has one for each."""
    n, home = len(x), x if g._base is None else g._base
    if not x.is_contiguous() or g.shape == x.shape or g.numel() > MOST or n not in g.shape[:2]:
        return ""
    if home_of(home) != home_of(x):  # the batch was copied to a device
        if g._base is None or home.shape != x.shape or home.dtype != x.dtype or not home.is_contiguous():
            return ""
        if not torch.equal(home.cpu(), x.cpu()):
            return ""
        x = home
    elif home_of(g) != home_of(x):
        return ""
    if len(g) == n and g.stride(0) == x.stride(0):
        wide = [[k for k in y.shape if k > 1] for y in (g, x)]
        if wide[0] != wide[1] and sorted(wide[0]) == sorted(wide[1]) and g.is_contiguous():
            return f"an input {tuple(g.shape)} is a view of the batch's {tuple(x.shape)}: it has other entries in each place"
        return ""
    samples = torch.full((), g.storage_offset() - x.storage_offset())
    for axis, (length, stride) in enumerate(zip(g.shape, g.stride(), strict=True)):
        samples = samples + (torch.arange(length) * stride).view(-1, *[1] * (g.dim() - axis - 1))
    samples = samples.div(x.stride(0), rounding_mode="floor")
    if int(samples.min()) < 0 or int(samples.max()) >= n:
        return ""
    rows = samples.reshape(len(g), -1)
    detail = f"an input {tuple(g.shape)} is a view of the batch's {tuple(x.shape)}: "
    if bool((rows == rows[:, :1]).all()):
        count = len(rows[:, 0].unique())
        return f"{detail}its {n} rows are those of {count} of {n} samples" if len(g) == n and 1 < count < n else ""
    if g.dim() < 2 or g.shape[1] != n:
        return ""
    columns = samples.movedim(1, 0).reshape(n, -1)
    return "" if bool((columns == columns[:, :1]).all()) else f"{detail}its rows and columns hold several samples each"


def rows_of(given: list[Tensor]) -> int:
    """Return the number of samples that a model without a loader is given: of several inputs of tokens (N, T) with other lengths the
    axis that they share. 0 where that is not known: rows may be time, or nodes that depend on each other."""
    texts = [x for x in given if x.dim() == 2 and x.dtype == torch.int64]
    lengths = {x.shape[1] for x in texts}
    return len(texts[0]) if len(lengths) > 1 and len({len(x) for x in texts}) == 1 else 0


def reading_time_first(module: nn.Module) -> list[nn.Module]:
    """Return the recurrent layers that read time first."""
    return [m for m in module.modules() if isinstance(m, nn.RNNBase) and not m.batch_first]


def columns_of(module: nn.Module, given: list[Tensor]) -> int:
    """Return the number of samples in the inputs (T, N, ...) of a model with recurrent layers that read time first, as they do by default; 0
    where that is not known."""
    sizes = {x.shape[1] for x in given if x.dim() > 1}
    size = sizes.pop() if len(sizes) == 1 and reading_time_first(bare(module)) else 0
    return size if size >= 4 and not any(n == size for x in given if x.dim() > 1 for n in (len(x), *x.shape[2:])) else 0


def time_first(module: nn.Module, given: list[Tensor], call: Callable[[], Any]) -> bool:
    """Return whether a recurrent layer that reads time first is given the first two axes of an input as they are."""
    shapes = {x.shape[:2] for x in given if x.dim() > 1}
    found: list[bool] = []

    def note(_module: nn.Module, given: tuple) -> None:
        found.append(getattr(given[0], "shape", ())[:2] in shapes)

    with hooked(m.register_forward_pre_hook(note) for m in reading_time_first(module)):
        call()
    return any(found)


def by_sample(given: list[Tensor], size: int) -> bool:
    """Return whether the first axis of a model's inputs, and no other, is that of the samples."""
    return size >= 4 and any(len(x) == size for x in given) and not any(size in x.shape[1:] for x in given)


def halved(module: nn.Module, args: tuple, kwargs: dict, size: int, axis: int = 0) -> float | None:
    """Return how much the outputs of half of a batch change without the other half, in units of the outputs' spread; None where
    that cannot be computed, the outputs are random, or they are not one row per sample. `axis`: that of the samples."""
    inner = bare(module)
    norms = [m for m in inner.modules() if isinstance(m, NORMS) and not m.track_running_stats]
    if norms or any(p.dtype in (torch.bfloat16, torch.float16) for p in parameters_of(inner)):
        return None
    leaves, spec = tree_flatten((args, kwargs))
    if any(isinstance(x, (list, tuple)) and len(x) == size for x in (*args, *kwargs.values())):
        return None
    leaves = [x.detach() if isinstance(x, Tensor) else x for x in leaves]
    half, after = size // 2, []

    def call(rows: slice, n: int) -> list[Tensor]:
        part = [cut(x, rows, size, axis) if isinstance(x, Tensor) else x for x in leaves]
        half, named = tree_unflatten(part, spec)
        random.seed(0), np.random.seed(0)  # teacher forcing
        found = [x.movedim(axis, 0) for x in outputs(inner(*half, **named), n, axis)]
        after.append((random.getstate(), np.random.get_state()[2]))
        return found

    try:
        with kept_draws(), in_mode(inner, training=False), torch.no_grad():
            given = [x for x in leaves if isinstance(x, Tensor)]
            if axis and not time_first(inner, given, lambda: call(slice(None), size)):
                return None
            after.clear()
            found = [call(slice(None), size), call(slice(None), size), call(slice(half), half)]
            # What runs along the batch leaves the first half as it is
            found.append(call(slice(half, None), size - half))
    except Exception:
        return None
    if any(len(x) != 1 for x in found) or any(state != after[0] for state in after):  # a draw for each sample
        return None
    whole, again, *parts = (x[0] for x in found)
    spread = float(whole.std())
    if size in whole.shape[1:] or whole.shape != again.shape or not 0 < spread < float("inf"):
        return None
    if any(x.shape[1:] != whole.shape[1:] for x in parts) or float((whole - again).abs().max()) > 1e-3 * spread:
        return None
    return float((torch.cat(parts) - whole).abs().max()) / spread


def cut(x: Tensor, rows: slice, size: int, axis: int) -> Tensor:
    """Return the samples `rows` of an input, or all of it where it has no axis of the samples. Lengths have one axis alone."""
    axis = min(axis, x.dim() - 1)
    return x[(slice(None),) * axis + (rows,)] if axis >= 0 and x.shape[axis] == size else x


def outputs(out: Any, size: int, axis: int = 0) -> list[Tensor]:
    """Return a model's outputs that have a row for each sample, the first of them alone if there are several."""
    found = [x for x in floats(out) if x.dim() > axis]
    return [x.float() for x in found if x.shape[axis] == size][:1]


def check(seen: Any) -> list[tuple[str, str]]:
    """Return what was measured, and its cause; the cause is empty if all is well."""
    one, found = seen.rows, []
    if one.crossed >= ENOUGH and one.crossed >= 0.5 * one.looks:
        meant = "a column, transpose(), permute() or unbind()"
        found.append((one.detail, f"view() or reshape() where {meant} is meant: samples or places are mixed"))
    changes = {}
    trained = [call for key, call in one.calls.items() if key not in seen.downstream]  # a critic may compare samples
    by_rows = [(call, 0) for call in (*trained, *one.scored.values())]
    for call, axis in [*by_rows, *((call, 1) for call in one.columns.values())]:
        module, change = call[0], halved(*call, axis)
        if change is not None:
            name = type(module).__name__
            changes[name] = max(change, changes.get(name, 0.0))
    if changes:
        name = max(changes, key=lambda k: changes[k])
        cause = (
            "the model mixes samples: an axis is wrong (softmax, normalisation or attention over the batch; "
            "batch_first=True is missing), or a view() mixes rows"
        )
        measured = (
            f"outputs of {name} change by {changes[name]:.2g} of their spread without the other half of the batch"
        )
        found.append((measured, cause if changes[name] > MIXED else ""))
    return found
