"""Controls a rehearsal: which batches the script gets, when a pass over a loader ends early, when the rehearsal
ends."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten
from trainworthy.core.base.clock import now
from trainworthy.guard.checks.oracle import Oracle
from trainworthy.guard.checks.right_answers import Answers
from trainworthy.guard.measures.data.joined_samples import arrange, joined, unfit
from trainworthy.guard.measures.records import Pass, written
from trainworthy.guard.observing.observer import Observer

EIGHT = 8
TEXTS = (list, tuple)
ANSWERED = ("right", "wrong")
TO_THE_END = ("end", "trained", "held", *ANSWERED)
PART = 0.03  # of the time that is left: one pass over training data on the way to the script's end
RARE = 2  # other targets among the first eight, from which on these are taken
FEW = 12  # optimiser steps after which a slow script is cut
WAIT = 8.0  # seconds after enough was trained until an evaluation must have begun
AHEAD = 3  # steps from the announcement of a cut to the cut: no rank is so many steps behind another


@dataclass
class Plan:
    """One rehearsal."""

    name: str = "watch"
    """`watch`: the script's own data; `eight`: the same eight samples in every batch; `others`: these eight with each
    other's inputs; `blank`: these eight with zero inputs; `restart`: the script's own data, from a checkpoint; `end`: the script's own data,
    all passes cut short, to the end of the script; `later`: a training after the first one, with the passes before it cut short;
    `oracle`: the script's own data, and right and wrong answers in its evaluations; `trained` and `held`: as `end`, with passes of given
    lengths, `held` with the weights as they were drawn; `right` and `wrong`: the same, with right answers in all evaluations, or those of other
    samples."""
    steps: int = 40
    """Optimiser steps after which a training pass is cut (not before `seconds`)."""
    seconds: float = 6.0
    most: int = 400
    """Optimiser steps after which it is cut in any case, unless `steps` are more."""
    eval_batches: int = 60
    limit: float = 60.0
    """Seconds after the first optimiser step at which the rehearsal ends."""
    evaluate: bool = True
    seed: int | None = None
    restart: bool = False
    """Keep what is needed to compare a restart with what was saved."""
    ranks: int = 1
    """Processes of the rehearsal."""
    whole: bool = False
    """Of `end` and `later`: passes without gradients are not cut short, because the script needs all that they compute."""
    later: int = 0
    """Of `later`: the number of the optimiser that the script builds for the training that is watched."""
    lengths: list[int] | None = None
    """Of `trained` and `held`: batches after which each pass is cut; 0: it is not."""
    reseed: int = 0
    """Is added to the seeds of torch, numpy and random that the script sets."""
    target: int | None = None
    """Index of the target among the batch's tensors; None: the only row of class numbers."""
    numbers: bool = False
    """Of `right` and `wrong`: the targets are numbers, and not classes."""
    inputs: list[int] | None = None
    """Indices of the entries that are exchanged; None: all but the target."""


class Control:
    """Decisions for one plan. `stop` never returns: it writes the record and exits the process."""

    def __init__(self, plan: Plan, stop: Callable[[str], None]):
        self.plan, self.stop = plan, stop
        self.started = self.first = now()
        self.phase = "train"
        self.kept: dict[int, Any] = {}
        self.rng = np.random.default_rng(0)
        self.after = 0
        self.since: float | None = None  # when enough was trained: slow scripts get the same time for their evaluation
        self.closed = ""
        self.changed = 0
        self.unfit = ""  # why the samples of a batch cannot be exchanged
        self.begin: Callable[[], None] = lambda: None  # called at the first backward()
        self.scored: list[tuple[Pass, list[int]]] = []  # the last evaluations, and where what was printed after each is
        self.rank, self.home = 0, None  # of several processes; folder of rank 0
        self.cut_at: int | None = None
        self.optimizers = 0
        self.oracle = Oracle() if plan.name == "oracle" else None
        if plan.name in ANSWERED:
            self.oracle = Answers(plan.target, right=plan.name == "right", numbers=plan.numbers)
        self.arrived = plan.name != "later"
        self.begun = False
        self.quota: dict[tuple, int] = {}  # batches of an evaluation, by its length and batch size

    def arrives(self) -> bool:
        """An optimiser was built. Return whether the training that is to be watched begins with it."""
        self.optimizers += 1
        if self.arrived or self.optimizers != self.plan.later:
            return False
        self.arrived, self.first = True, now()
        return True

    def another(self, steps: int) -> None:
        """An optimiser was built after `steps` steps. On eight samples only the first training counts: the next fold begins with
        other weights."""
        if self.plan.name in ("eight", "others") and steps >= FEW:
            self.stop("another training begins")

    # --- length

    def enough(self, seen: Observer) -> bool:
        """Return whether the training part of this rehearsal is done."""
        units = seen.steps or seen.backwards
        if self.home is not None:
            return self._agreed(units)
        return self._done(units)

    def _done(self, units: int) -> bool:
        lasted = now() - self.first
        if self.plan.name == "watch" and units >= FEW and lasted > 0.6 * self.plan.limit:
            return True  # a slow script: what is left of the time is for its evaluation
        trained = units >= self.plan.steps and (lasted >= self.plan.seconds or units >= self.plan.most)
        return trained or bool(self.closed)

    def _agreed(self, units: int) -> bool:
        """With several ranks: rank 0 announces the step, soon to come, at which all of them cut their pass."""
        note = os.path.join(self.home, "cut-at")
        if self.cut_at is None and os.path.exists(note):
            with open(note) as file:
                self.cut_at = int(file.read() or 0) or None
        elif self.cut_at is None and not self.rank and self._done(units):
            self.cut_at = units + AHEAD
            with open(f"{note}.spare", "w") as file:
                file.write(str(self.cut_at))
            os.replace(f"{note}.spare", note)
        return self.cut_at is not None and units >= self.cut_at

    def cut(self, one: Pass, seen: Observer) -> bool:
        if self.plan.lengths is not None and one.number < len(self.plan.lengths):
            return 0 < self.plan.lengths[one.number] <= one.got
        if self.plan.name in TO_THE_END or not self.arrived:
            return self._short(one, seen)
        if one.training:
            # all loaders of the loop end together; the second epoch only shows its order and mode
            return self.enough(seen) and (one.steps >= 4 or one.got >= 12)
        if one.calls and seen.steps and one.got >= self.plan.eval_batches and not one.refreshing:
            # Calls with gradients in train mode are pending: an unfinished accumulation window
            return one.no_grad_calls > 0 or not any(mode for _, mode, _, _ in one.modes)
        return False

    def _short(self, one: Pass, seen: Observer) -> bool:
        """To the end of the script: a pass of training may take a part of what is left of the time, and ends after a step; an
        evaluation has as many batches as the first one on data of its size."""
        if one.training:
            left = max(0.0, self.plan.limit - (now() - self.first))
            return one.got >= 4 and not seen.since and now() - one.clock > PART * left
        if self.plan.whole or not one.calls or not one.no_grad_calls or not seen.backwards:
            return False
        key = (one.length, one.loader.batch_size)
        if key not in self.quota and one.got >= 4 and now() - one.clock > PART * self.plan.limit / 2:
            self.quota[key] = one.got
        return one.got >= self.quota.get(key, one.got + 1)

    def tick(self, seen: Observer) -> None:
        """Check at every model call whether the rehearsal is over."""
        if (seen.steps or seen.backwards) and not self.rank and now() - self.first > self.plan.limit:
            self.stop("its time is over")

    def backward(self, seen: Observer) -> None:
        if seen.backwards == 1:
            self.first = now()
            if not self.begun:
                self.begun = True
                self.begin()
        if not self.arrived:
            return
        if not seen.groups and seen.backwards >= self.plan.steps + 4:
            self.stop("there is no optimiser")
        self._closed(seen)

    def _closed(self, seen: Observer) -> None:
        """Return whether the loop has memorised the eight samples."""
        if self.plan.name != "eight" or len(seen.losses) < 12:
            return
        recent = [abs(x) for x in seen.losses[-4:]]
        if max(recent) < 0.05 * max(abs(x) for x in seen.losses[:3]):
            self.closed = "closed"

    def step(self, seen: Observer) -> None:
        if self.oracle is not None:
            return self.stop("enough") if self.oracle.done() else None
        if not self.arrived or not self.enough(seen) or self.rank:
            return
        self.since = now() if self.since is None else self.since
        if not self.plan.evaluate:
            self.stop("enough")
        passes = [p for p in seen.passes if p.training]
        evaluated = self.evaluations(seen)
        if passes and any(p.started >= passes[0].started + passes[0].steps for p in passes[1:]):
            self.after += 1
        if evaluated and self.after >= 6:
            self.stop("enough")
        if self.after >= 60:
            self.stop("no evaluation in two epochs")
        if evaluated and seen.steps - evaluated[0] >= 6 and (not passes or not passes[0].was_cut):
            self.stop("enough")
        if now() - self.since > WAIT:
            self.stop("enough" if evaluated else f"no evaluation in the {WAIT:.0f} s after enough steps")

    def evaluations(self, seen: Observer) -> list[int]:
        """Return the optimiser steps before each evaluation: a pass without gradients, or model calls without them between
        steps: several, or one on more samples than a batch has."""
        found = [p.started for p in seen.passes if p.calls and not p.backwards and p.started and p.ended]
        found += seen.gaps.evaluations() or seen.gaps.whole()
        return sorted(found)

    @property
    def output_span(self) -> list[int]:
        """Where what was printed after the last evaluation is."""
        return self.scored[-1][1] if self.scored else []

    def ended(self, one: Pass) -> None:
        """An evaluation's pass has ended: what is printed from here to the next batch is its result."""
        if one.calls and not one.backwards and not one.was_cut:
            self.scored = [*self.scored[-2:], (one, [written(), -1])]
            if self.oracle is not None:
                self.oracle.ended(one, self.output_span)

    # --- data

    def batch(self, one: Pass, batch: Any, seen: Observer) -> Any:
        if self.output_span and self.output_span[1] < 0:
            self.output_span[1] = written()
        return self.intervene(id(one.loader), batch)

    def intervene(self, source: int, batch: Any) -> Any:
        """Return the plan's batch in place of `batch`."""
        if self.plan.name in ("watch", "restart", "later", "oracle", *TO_THE_END):
            return batch
        self.unfit = self.unfit or unfit(batch)
        if self.unfit:
            return batch
        first = self.kept.setdefault("train", batch)
        if signature(first) != signature(batch):  # a loader with other data
            first = self.kept.setdefault(source, batch)
        target = target_of(flattened(first)[0], self.plan.target)
        out = same_eight(first, size_of(batch), varied(first, target))
        if self.plan.name in ("others", "blank"):
            out = self._inputs(out)
        return out

    def _inputs(self, batch: Any) -> Any:
        leaves, spec = flattened(batch)
        target = target_of(leaves, self.plan.target)
        n = size_of(batch)
        if target is None or n < 2:
            return batch
        order = self.rng.permutation(min(EIGHT, n)).tolist()
        longest_first = descending(leaves, n)
        layout = layout_of(len(order), n, longest_first)
        where = torch.tensor([layout.index(order[k]) for k in layout])
        inputs = None if self.plan.inputs is None else [place_of(leaves, i) for i in self.plan.inputs]

        def mine(i: int) -> bool:
            """Whether an entry is exchanged: the inputs are, or, where they must stay in order of length, all others."""
            return (i != target if inputs is None else i in inputs) != longest_first

        whole, count = arrange(leaves, n, where.tolist(), mine)
        self.changed += count
        for i, x in enumerate(leaves):
            if not mine(i) or i in whole or not isinstance(x, (Tensor, *TEXTS)):
                continue
            if (axis := axis_of(x, n)) is None:
                continue
            self.changed += 1
            if not isinstance(x, Tensor):
                leaves[i] = type(x)(x[k] for k in where.tolist())
            else:
                moved = x.index_select(axis, where.to(x.device))
                leaves[i] = torch.zeros_like(x) if self.plan.name == "blank" else moved
        return tree_unflatten(leaves, spec)


def texts(x: Any) -> bool:
    """Return whether this is a list of texts, as torch's collate function makes one from a text of each sample."""
    return type(x) in TEXTS and len(x) > 1 and all(isinstance(v, str) for v in x)


def flattened(batch: Any) -> tuple[list, Any]:
    """Return the entries of a batch, and its structure. A list of texts is one entry."""
    return tree_flatten(batch, is_leaf=texts)


def place_of(leaves: list, number: int) -> int:
    """Return which entry holds a leaf that was counted with every text as one."""
    for i, x in enumerate(leaves):
        number -= len(x) if texts(x) else 1
        if number < 0:
            return i
    return len(leaves)


def axis_of(x: Any, n: int) -> int | None:
    """Return the axis of `n` samples of an entry: the first one, or the second one of rows with time first."""
    if not isinstance(x, Tensor):
        return 0 if len(x) == n else None
    return next((axis for axis in range(min(2, x.dim())) if x.shape[axis] == n), None)


def signature(batch: Any) -> tuple:
    """Return structure, types and shapes of a batch, without its size and without the length of padded rows of tokens, or of rows with
    time first. A tuple counts as a list: loaders make lists."""
    leaves, spec = flattened(batch)
    n = size_of(batch)

    def shape(x: Tensor) -> tuple:
        return ("tokens",) if padded(x) else tuple(x.shape[2 if axis_of(x, n) == 1 else 1 :])

    kinds = tuple((x.dtype, shape(x)) if isinstance(x, Tensor) else type(x) for x in leaves)
    return str(spec).replace("(tuple", "(list"), kinds


def padded(x: Tensor) -> bool:
    """Return whether the second axis of a batch may be as long as its longest text."""
    return x.dim() == 2 and x.dtype in (torch.int64, torch.int32, torch.bool)


def size_of(batch: Any) -> int:
    """Return the number of samples in a batch: the first dimension of most of its tensors, if two or more agree."""
    leaves = flattened(batch)[0]
    lengths = [len(x) for x in leaves if isinstance(x, Tensor) and x.dim()] or [len(x) for x in leaves if texts(x)]
    if len(set(lengths)) == len(lengths) > 2:  # no two entries agree: one may hold the ends of another's rows
        return next((n for n in sorted(lengths) if joined(leaves, n)), max(set(lengths), key=lengths.count))
    return max(set(lengths), key=lengths.count) if lengths else 0


def same_eight(batch: Any, size: int, rows: list[int] | None = None) -> Any:
    """Return eight samples of `batch` (its first, or those in `rows`), repeated up to `size`."""
    leaves, spec = flattened(batch)
    n = size_of(batch)
    rows = rows or list(range(min(EIGHT, n)))
    where = [rows[k] for k in layout_of(len(rows), size, descending(leaves, n))]
    whole, _ = arrange(leaves, n, where)
    for i, x in enumerate(leaves):
        if i in whole:
            continue
        if not (isinstance(x, Tensor) or texts(x)) or (axis := axis_of(x, n)) is None:
            continue
        if isinstance(x, Tensor):
            leaves[i] = x.index_select(axis, torch.tensor(where, device=x.device))
        else:
            leaves[i] = type(x)(x[k] for k in where)
    return tree_unflatten(leaves, spec)


def descending(leaves: list, n: int) -> bool:
    """Return whether an entry holds the lengths of the samples, and the longest is first, as `pack_padded_sequence` needs them."""
    for x in leaves:
        if isinstance(x, Tensor) and x.dim() == 1 and x.dtype in (torch.int64, torch.int32) and len(x) == n > 2:
            steps = x.diff()
            if bool((steps <= 0).all()) and int((steps < 0).sum()) > 1 and int(x[-1]) > 0:
                return True
    return False


def layout_of(count: int, size: int, in_order: bool) -> list[int]:
    """Return which of `count` samples is at each of `size` places: one after the other again and again, or, in order, each one's
    repetitions next to each other."""
    rows = [k % count for k in range(size)]
    return sorted(rows) if in_order else rows


def varied(batch: Any, target: int | None) -> list[int] | None:
    """Return eight rows with several targets that differ from the first one, if fewer than two of the first eight do: of rare positives
    a few are needed, or there is little to learn. None: the first eight."""
    leaves, n = flattened(batch)[0], size_of(batch)
    y = leaves[target] if target is not None and target < len(leaves) else None
    if not isinstance(y, Tensor) or not y.dim() or len(y) != n or y.numel() != n or n <= EIGHT:
        return None
    y = y.detach().flatten()
    other = (y != y[0]).nonzero().flatten().tolist()
    chosen = [k for k in other if k < EIGHT]
    if not other or len(chosen) >= RARE or len(other) == len(chosen):
        return None
    other = other[: EIGHT // 2]
    rows = [k for k in range(n) if k not in other][: EIGHT - len(other)]
    return sorted([*rows, *other])


def target_of(leaves: list, number: int | None) -> int | None:
    """Return the index of the target among a batch's entries: the loss's target, else the only row of class numbers."""
    if number is not None:
        return place_of(leaves, number)
    found = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.dtype == torch.int64 and x.dim() == 1]
    return found[0] if len(found) == 1 else None
