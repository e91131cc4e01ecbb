"""Finds where samples of a batch influence each other, and what a model answers from that ignores its input."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from trainworthy.core.base import seeds
from trainworthy.core.base.modes import hooked
from trainworthy.core.gates.causes.scores import Axes
from trainworthy.core.loop.run import Run, evaluating
from trainworthy.core.recipe.stage import Data, Stage, View

NO_EXPERIMENT = "no experiment explains it"
MOVED = 0.1  # of a gradient's direction: the weights of a mean change its size alone
UNTRAINED = "the metric does not look at the answers"
Rows = list[Tensor]


# ----------------------------------------------------------------------------------------------------------- dependency
@dataclass
class Mixture:
    """Reads batches of the same samples for the experiments."""

    run: Run
    stage: Stage
    data: Data
    read: Callable[[Sequence[int]], dict]
    """Indices -> batch."""
    limit: float
    """Relative difference up to which two numbers are the same one."""
    calls: dict[tuple[int, ...], list[tuple[str, Rows, Rows]]] = field(default_factory=dict)

    def loss(self, indices: Sequence[int], targets: Sequence[int] | None = None) -> float:
        return float(self.total(indices, targets))

    def total(
        self, indices: Sequence[int], targets: Sequence[int] | None = None, *, entry: str = "", graph: bool = False
    ) -> Any:
        """Sum of the loss terms of these samples; `targets`: the samples whose targets they get, or whose `entry`."""
        batch = self.read(indices)
        if targets is not None:
            others = self.read(targets)
            keys = [entry] if entry else [k for k, f in self.data.fields.items() if f.role == "target" and k in others]
            batch |= {k: others[k] for k in keys}
        with evaluating(self.stage.model), torch.set_grad_enabled(graph), self.run.autocast():
            return sum(self.stage.loss(self.stage.model, batch).values())

    def same(self, a: float, b: float) -> bool:
        return abs(a - b) <= self.limit * max(abs(a), abs(b), 1e-8)

    def forwards(self, indices: Sequence[int]) -> list[tuple[str, Rows, Rows]]:
        """(module, its inputs, its outputs) of every call during the loss, in the order in which calls end."""
        key = tuple(indices)
        if key not in self.calls:
            found: list[tuple[str, Rows, Rows]] = []

            def record(name: str) -> Callable:
                return lambda _, given, out: found.append((name, _rows(given), _rows(out)))

            with hooked(m.register_forward_hook(record(name)) for name, m in self.stage.model.named_modules()):
                self.loss(indices)
            self.calls[key] = found
        return self.calls[key]


def explain_mixed_samples(m: Mixture, indices: Sequence[int], *, mean: bool) -> str:
    """Return which experiment explains that the batch's loss or gradients are not those of its samples."""
    whole, rows = m.loss(indices), sum(m.loss([i]) for i in indices)
    if math.isfinite(whole) and not math.isfinite(rows):
        return (f"statistics over the batch axis: a sample alone has the loss {rows:g}, which {len(indices)} samples together do not have, as from "
                "a deviation over samples, x.std(0) (take it over the entries of one sample)")  # fmt: skip
    if mean:
        return (f"the loss is a MEAN over the batch: return the SUM, core divides it by the counts ({len(indices)} times {whole:.4g} is "
                f"the sum over single samples, {rows:.4g})")  # fmt: skip
    if why := explain_calls(m, indices):
        return why
    return _in_the_model(m, indices) or _over_samples(m, indices[0]) or _in_the_loss(m, indices) or (
        f"{NO_EXPERIMENT}: every module gives each sample what it gives it alone, and the loss is neither a sum over pairs of "
        "samples nor that of targets shifted by one")  # fmt: skip


def explain_calls(m: Mixture, indices: Sequence[int]) -> str:
    """Return that the loss of the same batch with the same draws changes from call to call, if it does."""
    values = []
    for _ in range(2):
        seeds.seed_global("equal draws")
        values.append(m.loss(indices))
    near = m.same(*values) if m.run.device.type != "cpu" else values[0] == values[1]
    if near:
        return ""
    return ("the loss of one batch changes from call to call with equal draws ({:.8g}, then {:.8g}): it counts its calls or keeps what it saw "
            "before, which no checkpoint holds; compute it in train() from the step, or keep it in stage.state".format(*values))  # fmt: skip


def is_independent(m: Mixture, indices: Sequence[int]) -> bool:
    """Return whether every module gives each of these samples what it gives it alone."""
    names = [[name for name, _, _ in m.forwards(some)] for some in (indices, *([i] for i in indices))]
    return bool(names[0]) and all(own == names[0] for own in names) and not _in_the_model(m, indices)


def _in_the_model(m: Mixture, indices: Sequence[int]) -> str:
    """The first module whose rows depend on the other samples, and whether on their order."""
    together, alone = m.forwards(indices), [m.forwards([i]) for i in indices]
    names = [n for n, _, _ in together]
    if not names or any([n for n, _, _ in one] != names for one in alone):
        return ""
    for call, (name, given, made) in enumerate(together):
        if not (differ := _unlike_alone(made, [one[call][2] for one in alone], m.limit)):
            continue
        of = type(m.stage.model.get_submodule(name) if name else m.stage.model).__name__
        place = f"{name} ({of})" if name else f"the model ({of})"
        padded = differ <= _padded(m, indices)
        whose = "padding is not masked (only the samples that are padded in this batch change)" * padded
        if _unlike_alone(given, [one[call][1] for one in alone], m.limit):
            if moved := _moved_entries(m, indices):
                return moved
            parent = name.rpartition(".")[0] or "the model"
            return f"{whose or _kind(m, indices, call, of_inputs=True)}: before {place}, in the forward of {parent}"
        return f"{whose or _kind(m, indices, call)}: in {place}; what it reads is still each sample's own"
    return ""


def _moved_entries(m: Mixture, indices: Sequence[int]) -> str:
    """Whether the loss puts the samples of one entry in another order and not those of another: which rows of the model's input change with
    each entry of the first sample."""
    batch, given = m.read(indices), []

    def keep(_: Any, args: Any, kwargs: Any) -> None:
        given.append(_rows([args, kwargs], ints=True))

    def inputs(batch: dict) -> Rows:
        given.clear()
        with (
            hooked([m.stage.model.register_forward_pre_hook(keep, with_kwargs=True)]),
            evaluating(m.stage.model),
            torch.no_grad(),
        ):
            m.stage.loss(m.stage.model, batch)
        return [x for call in given for x in call]

    own, rows = inputs(dict(batch)), {}
    for key, x in batch.items():
        other = _altered(x, len(indices))
        if other is None:
            continue
        found = inputs({**batch, key: other})
        pairs = [(a, b) for a, b in zip(own, found, strict=False) if a.shape == b.shape and len(a) == len(indices)]
        rows[key] = {j for a, b in pairs for j in range(len(a)) if not torch.equal(a[j], b[j])}
    away = {key: min(found) for key, found in rows.items() if len(found) == 1 and 0 not in found}
    stays = [key for key, found in rows.items() if found == {0}]
    if not away or not stays:
        return ""
    key, row = next(iter(away.items()))
    return (f"the loss puts the samples of '{key}' in another order than those of {', '.join(map(repr, stays))}: a change of the first "
            f"sample's reaches row {row} of the model's input, a change of the others' row 0; entries of one sample must stay together (a "
            "pairing that is meant, as of noise: declare it in Expect.batch_dependence)")  # fmt: skip


def _altered(x: Any, n: int) -> Tensor | None:
    """Return an entry of the batch with another first sample: shifted by a hundredth, or with the value of another one; None if there is none."""
    if not isinstance(x, Tensor) or x.shape[:1] != (n,):
        return None
    other = x.clone()
    if x.is_floating_point():
        other[0] = x[0] * 1.01 + 0.01
        return other
    for row in x[1:]:
        if not torch.equal(row, x[0]):
            other[0] = row
            return other
    return None


def _padded(m: Mixture, indices: Sequence[int]) -> set[int]:
    """Return the places of the samples that are longer in this batch than alone; none if all are."""
    shapes = [
        {k: x.shape[1:] for k, x in m.read(some).items() if isinstance(x, Tensor)}
        for some in (indices, *([i] for i in indices))
    ]
    found = {j for j, own in enumerate(shapes[1:]) if own != shapes[0]}
    return found if len(found) < len(indices) else set()


def _kind(m: Mixture, indices: Sequence[int], call: int, *, of_inputs: bool = False) -> str:
    """Statistics do not depend on the order of the other samples; a reshape does."""
    side = 1 if of_inputs else 2
    first = m.forwards(indices)[call][side]
    turned = m.forwards([indices[0], *reversed(indices[1:])])[call][side]
    moved = any(_gap(a[0], b[0]) > m.limit for a, b in zip(first, turned, strict=True) if len(a) == len(indices))
    if moved:
        return "a reshape that mixes samples (rows change with the order of the others, not only with what they are)"
    return "statistics over the batch axis, or attention across it (rows change with the other samples, not with their order)"


def _over_samples(m: Mixture, index: int) -> str:
    """Whether the loss has a softmax over samples: that of two and of four copies of one sample, which have the same lengths."""
    found = []
    for copies in (2, 4):
        with Axes() as axes:
            m.loss([index] * copies)
        found.append(axes.seen)
    if len({len(seen) for seen in found}) > 1:
        return ""
    for (name, axis, two), (_, other, four) in zip(*found, strict=True):
        if axis == other and two != four:
            return (f"{name} runs over axis {axis}, which holds samples ({two} entries of two samples, {four} of four): probabilities sum to 1 "
                    "over a batch and not over the classes or tokens")  # fmt: skip
    return ""


def _in_the_loss(m: Mixture, indices: Sequence[int]) -> str:
    """The formula that the loss of several samples fits. One set of samples can fit by accident: several have to."""
    has_targets = any(f.role == "target" for f in m.data.fields.values())
    for by in (1, -1) if has_targets and len(indices) > 1 else ():
        try:
            fits = [_shifted(m, some, by) for some in (indices, indices[: max(2, len(indices) // 2)])]
        except (ValueError, RuntimeError, IndexError):  # a sample's targets are longer than its neighbour's
            break
        if all(m.same(*both) for both in fits):
            return ("targets are shifted by one sample in the loss, because the batch is flattened before a shift, or rolled: it equals that "
                    "of each input with its neighbour's target ({:.4g} and {:.4g})".format(*fits[0]))  # fmt: skip
    if len(indices) < 3 or m.same(m.loss(indices), sum(m.loss([i]) for i in indices)):
        return ""  # a plain sum fits the formula of pairs, too
    threes = [_by_pairs(m, three) for three in itertools.combinations(indices[:4], 3)]
    for power, of in ((1, "a mean over one axis"), (0, "a sum"), (2, "a mean over both")):
        fits = [(found[power], whole) for found, whole in threes]
        if all(m.same(*both) for both in fits):
            return (f"a broadcast of (B, 1) with (B,) in the loss: that of three samples is {of} of all pairs, each sample with each "
                    "other ({:.4g} and {:.4g})".format(*fits[0]))  # fmt: skip
    return _other_answers(m, indices) or _other_entries(m, indices)


def _other_entries(m: Mixture, indices: Sequence[int]) -> str:
    """Whether an entry of one sample is part of the loss of others: if it alone is exchanged, the gradients of their answers change."""
    others = (indices[1], *indices[1:])  # the first sample gets the entry of the second
    batch = m.read(indices)
    read = {k for k, f in m.data.fields.items() if f.role == "input"}  # another input changes the model's answer, too
    for entry in (
        k for k, v in batch.items() if isinstance(v, Tensor) and v.shape[:1] == (len(indices),) and k not in read
    ):
        try:
            own, exchanged = _answer_gradients(m, indices), _answer_gradients(m, indices, others, entry)
        except (ValueError, RuntimeError, IndexError):
            continue
        if own is None or exchanged is None or own.shape != exchanged.shape:
            return ""
        moved = sum(_gap(a, b) > MOVED for a, b in zip(own[1:], exchanged[1:], strict=True))
        if moved:
            return (f"the loss of a sample reads the entry '{entry}' of others: with another one for the first of {len(indices)} samples, the "
                    f"gradients of {moved} other samples' answers change, although the model gives each sample its own")  # fmt: skip
    return ""


def _other_answers(m: Mixture, indices: Sequence[int]) -> str:
    """Whether a sample's target is compared with the model's answers to other samples: if it alone is exchanged, the gradients of
    their answers change."""
    others = (indices[1], *indices[1:])  # the first sample gets the target of the second
    try:
        own, exchanged = _answer_gradients(m, indices), _answer_gradients(m, indices, others)
    except (ValueError, RuntimeError, IndexError):  # samples of several lengths, or a loss that refuses it
        return ""
    if own is None or exchanged is None or own.shape != exchanged.shape:
        return ""
    moved = [
        a.any() and b.any() and _gap(a / a.norm(), b / b.norm()) > MOVED for a, b in zip(own, exchanged, strict=True)
    ]
    if not any(moved[1:]):
        return ""
    return (f"targets are compared with the answers to other samples: with another target for the first of {len(indices)} samples, the "
            f"gradients of {sum(moved[1:])} other samples' answers change; a view(), reshape(), transpose() or flatten() orders the model's "
            "output differently from the targets")  # fmt: skip


def _answer_gradients(
    m: Mixture, indices: Sequence[int], targets: Sequence[int] | None = None, entry: str = ""
) -> Tensor | None:
    """Gradient of the loss with respect to the model's first output that has an axis of samples, which becomes the first axis."""
    outputs: list[Tensor] = []

    def keep(_: Any, __: Any, out: Any) -> None:
        outputs.extend(x for x in tree_leaves(out) if isinstance(x, Tensor) and x.requires_grad)

    with hooked([m.stage.model.register_forward_hook(keep)]):
        total = m.total(indices, targets, entry=entry, graph=True)
    for out in outputs:
        axes = [d for d, size in enumerate(out.shape[:2]) if size == len(indices)]
        if axes and total.requires_grad:
            (found,) = torch.autograd.grad(total, [out], retain_graph=True, allow_unused=True)
            return None if found is None else found.movedim(axes[0], 0)
    return None


def _shifted(m: Mixture, indices: Sequence[int], by: int) -> tuple[float, float]:
    """(loss of the batch, loss of its inputs with their neighbours' targets)."""
    return m.loss(indices), sum(m.loss([i], [indices[(j - by) % len(indices)]]) for j, i in enumerate(indices))


def _by_pairs(m: Mixture, three: Sequence[int]) -> tuple[dict[int, float], float]:
    """(what the loss of three samples is by those of one and two of them, if it runs over all pairs, for each number of axes
    that it is a mean over; what it is)."""
    losses = {s: m.loss(s) for n in (1, 2) for s in itertools.combinations(three, n)}
    sums = {
        power: sum((1 if len(s) == 2 else -1) * len(s) ** power * v for s, v in losses.items()) for power in (0, 1, 2)
    }
    return {power: total / 3**power for power, total in sums.items()}, m.loss(three)


def _rows(values: Any, *, ints: bool = False) -> Rows:
    """Return the tensors among nested values, those of whole numbers on request."""
    return [
        x.detach() for x in tree_leaves(values) if isinstance(x, Tensor) and x.ndim and (ints or x.is_floating_point())
    ]


def _unlike_alone(together: Rows, alone: list[Rows], limit: float) -> set[int]:
    """Return the samples j for which a row j is not what sample j alone has. Tensors without a row for each sample are not compared."""
    found = set()
    for k, whole in enumerate(together):
        for j, own in enumerate(alone):
            if len(whole) != len(alone) or k >= len(own) or len(own[k]) != 1:
                break
            row = whole[j]
            if row.ndim != own[k].ndim - 1:
                break
            row = row[tuple(map(slice, own[k].shape[1:]))]  # the rest is padding
            if row.shape == own[k].shape[1:] and _gap(row, own[k][0]) > limit:
                found.add(j)
    return found


def _gap(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return 0.0
    size = max(a.norm().item(), b.norm().item())
    return (a - b).norm().item() / size if size > 0 else 0.0


# ------------------------------------------------------------------------------------------------------------- baseline
class Exchanged(View):
    """A view in which some entries, or the order of samples, are others'."""

    def __init__(self, view: View, entries: Sequence[str], swap: Sequence[int]):
        super().__init__(view.data, view.indices, blank=view.blank, draws=view.draws)
        self.entries, self.others = entries, swap

    def make(self, index: int, got: Any, generator: torch.Generator | None) -> dict[str, Any]:
        own = super().make(index, got, generator)
        other = super().make(self.others[index], self.read(self.others[index]), generator)
        return {**own, **{k: other[k] for k in self.entries if k in other}}


def explain_answers_without_input(
    view: View, measure: Callable[[View], float], untrained: Callable[[], float], reaches: Callable[[float], bool]
) -> str:
    """Return where a model that ignores its input has its answers from. `measure(view)`: its metric; `untrained()`: the metric of an
    untrained model; `reaches(value)`: whether a metric is that of right answers."""
    n, fields = len(view), view.fields
    turned = [(i + 1) % n for i in range(n)]
    own = measure(view)
    if not reaches(own):
        return ""
    bare = untrained()
    if reaches(bare):
        return f"{UNTRAINED}: an untrained model has {bare:.2f} on the same samples"
    entries = [k for k in view.get(0, None) if k not in fields or fields[k].role not in ("input", "target")]
    for key in entries:
        found = measure(Exchanged(view, [key], turned))
        if not reaches(found):
            return (f"the target reaches the model by another way, the entry '{key}': with another sample's the metric falls from {own:.2f} "
                    f"to {found:.2f}")  # fmt: skip
    targets = [k for k, f in fields.items() if f.role == "target"]
    found = measure(Exchanged(view, targets, turned))
    if reaches(found):
        return (f"the target reaches the model by another way, the target's own entry: given another sample's '{targets[0]}' it answers "
                f"that ({found:.2f})")  # fmt: skip
    back = View(view.data, list(reversed(view.indices)), blank=view.blank, draws=view.draws)
    found = measure(back)
    if not reaches(found):
        return (f"the target reaches the model by another way, the sample's position in the batch: in reverse order the metric falls from "
                f"{own:.2f} to {found:.2f}")  # fmt: skip
    return (f"{NO_EXPERIMENT}: exchanging the entries of a sample that are no input, its target, and the order in the batch leave "
            f"the metric at {own:.2f}")  # fmt: skip
