"""Checks whether samples of a batch influence each other: four at a time against each alone, and a batch of the run's
size against both."""

import contextlib
import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from trainworthy.core.base.verdict import Finding, Skip
from trainworthy.core.gates import gate
from trainworthy.core.gates.causes.dependence import Mixture, explain_calls, explain_mixed_samples, is_independent
from trainworthy.core.gates.causes.scores import explain_in_batch
from trainworthy.core.gates.causes.weighted_means import is_weighted_mean
from trainworthy.core.gates.checks.lookahead import LIMIT as AHEAD
from trainworthy.core.gates.checks.lookahead import lookahead
from trainworthy.core.gates.gate import GateContext, fetch, own_size, pick
from trainworthy.core.gates.recorder import rehearsed, training_samples
from trainworthy.core.loop.run import Run, evaluating
from trainworthy.core.recipe.stage import Data, Stage, View

LENGTHS = 512  # samples among which some of one length are searched
SMALL = 8  # samples; the other gates already cover batches of this size
TINY = 1e-3  # of the largest gradient: differences in smaller gradients do not count


@gate(
    "dependency",
    rows="C2",
    title="samples of a batch do not influence each other",
    reads="data model loss counts expect",
    explains=True,
)
def dependency(context: GateContext) -> Finding:
    """Check by backpropagation: the gradient of the batch's loss with respect to input j must equal that of sample j's
    own loss, and the batch's loss must be the sum over its rows. Uses the rehearsed model, because a zero-initialised
    head hides everything."""
    run, stage, _ = rehearsed(context)
    if stage.expect.batch_dependence:
        raise Skip(f"by design: {stage.expect.batch_dependence}")
    limit = 1e-3 if run.precision == "fp32" else 5e-2
    samples = Samples(run, stage, training_samples(context), context.cfg.run.seed, limit)
    used = [samples]  # as they were looked at last

    def draw(seen: Callable[[Samples], tuple]) -> tuple:
        """Repeat in double if rounding may be the cause. Rounding can flip ReLUs near zero, many at once in a flat
        region (observed: 2e-2). Only a real mixture remains in double."""
        found = seen(samples)
        if max(found[:2]) > limit and run.precision == "fp32" and run.device.type != "mps":
            # A loss with its own fp32 tensors cannot run in double; keep the fp32 result
            with contextlib.suppress(RuntimeError):
                exact = replace(samples, stage=replace(stage, model=copy.deepcopy(stage.model).double()), double=True)
                found = seen(exact)
                used.append(exact)
        return found

    gap, leak, mean = draw(_mixture)
    measured = (
        f"loss of a batch differs from the sum over its samples by {gap:.1e}, input gradients by {leak:.1e} (relative)"
    )
    evidence, cause = {"loss_gap": gap, "gradient_gap": leak}, ""
    n = min(own_size(context), len(samples.data))
    small = not (gap <= limit and leak <= limit)  # eight samples show it, or it is NaN
    if small:
        cause = _why(used[-1], mean=mean)
    elif n > SMALL and not stage.expect.gate_batch_size:  # it may occur in large batches only
        gap, leak, cause = draw(partial(_whole_batch, n=n))
        measured += f"; of the run's {n} samples by {gap:.1e} and {leak:.1e}"
        evidence |= {"samples": n, "loss_gap_whole": gap, "gradient_gap_whole": leak}
    # A user's loop without accumulation may have a mean over tokens: nothing adds up such means
    free = max(gap, leak) > limit and not context.sized and context.cfg.train.accumulate == 1
    if free and (excused := _weighted(used[-1], n, small=small)):
        gap, leak, words = excused
        measured += f"; {words}"
    ahead, where = 0.0, ""
    if max(gap, leak) <= limit:
        # A loss that refuses the changed batch
        with contextlib.suppress(RuntimeError, ValueError, IndexError, KeyError):
            ahead, where = lookahead(run, stage, samples.data, samples.seed)
    if where:
        measured += (
            f"; a target's own value in the input moves its prediction by {ahead:.1e} of what the target itself moves"
        )
        evidence["lookahead"] = ahead
    if ahead > AHEAD:
        cause = (f"the model reads the value that it must predict: {where}, and the prediction follows it\n"
                 "the input's window reaches into the target's, or a mask that hides later places is missing")  # fmt: skip
    return Finding(
        gap <= limit and leak <= limit and ahead <= AHEAD, measured, f"all at most {limit:g}",
        "statistics over the batch axis (a normalisation of your own, x.mean(0)), or a reshape that mixes samples\n"
        "a broadcast of (B, 1) with (B,) in the loss\nthe batch is flattened before a shift", evidence=evidence,
        cause=cause.strip(),
    )  # fmt: skip


@dataclass
class Samples:
    """The samples of a stage's training set, as one look at them reads and compares them."""

    run: Run
    stage: Stage
    data: Data
    seed: int
    limit: float
    """Relative difference up to which two numbers are the same one."""
    double: bool = False
    """Read floating-point entries in double precision, as the stage's model is then."""

    def pick(self, n: int) -> list[int]:
        return pick(self.data, n, self.seed)

    def read(self, indices: Sequence[int]) -> dict:
        batch = fetch(self.data, list(indices), self.seed, self.run.device)
        return {k: v.double() if self.double and _floating(v) else v for k, v in batch.items()}

    def mixture(self) -> Mixture:
        return Mixture(self.run, self.stage, self.data, self.read, self.limit)


def _why(s: Samples, *, mean: bool) -> str:
    """Return the cause that experiments on some samples support; nothing with several processes, because all ranks must run the same code."""
    if s.run.world > 1:
        return ""
    indices, mixture = s.pick(max(2, s.stage.expect.at_most(4))), s.mixture()
    if len(indices) > 3 and is_independent(mixture, indices):
        compared, wrong = explain_in_batch(lambda n: mixture.loss(indices[:n]))
        wrong = wrong or (compared and _same_views(s.stage, mixture.read(indices)))
        if compared and not wrong:
            raise Skip(f"{compared}, as contrastive losses do, by design")
        if wrong:
            return wrong
    return explain_mixed_samples(mixture, indices, mean=mean)


def _same_views(stage: Stage, batch: dict) -> str:
    """Return that two entries of a batch are equal, where nothing in the model draws: as views of a sample they teach nothing."""
    if any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in stage.model.modules()):
        return ""  # dropout makes two views of one sample
    floats = [(k, v) for k, v in batch.items() if _floating(v) and v.numel() > len(v) and v.std() > 0]
    for (one, a), (other, b) in itertools.combinations(floats, 2):
        if torch.equal(a, b):
            return f"the two views of each sample, '{one}' and '{other}', are equal: draw the augmentation for each of them"
    return ""


def _weighted(s: Samples, n: int, *, small: bool) -> tuple[float, float, str] | None:
    """Return (differences of loss and gradients, words) where the loss is a mean with weights, so that samples count by their lengths or
    classes; None otherwise."""
    if (found := _of_one_length(s, n)) is not None:
        gap, leak = found
        return gap, leak, f"of samples of one length by {gap:.1e} and {leak:.1e}: the loss is a mean over their entries"
    if small and _in_direction(s):
        return 0.0, 0.0, "each input's gradient has the direction that it has alone: the loss is a mean with weights"
    if small and _weighted_beside_others(s):
        return 0.0, 0.0, "the model answers each sample as it does alone, and pairs of losses fit a mean with weights"
    return None


def _of_one_length(s: Samples, n: int) -> tuple[float, float] | None:
    """Return the differences of loss and gradients for samples of one length if they are no more than `limit`, and the model treats
    samples of different lengths independently. None if there is something else, or if all samples have one length."""
    groups: dict[tuple, list[int]] = {}
    for i in s.data.order(s.seed, "lengths").tolist()[:LENGTHS]:
        sample = s.data.get(i, None)
        groups.setdefault(tuple(tuple(getattr(sample[k], "shape", ())) for k in s.data.fields), []).append(i)
    alike = max(groups.values(), key=len)
    if s.run.world > 1 or len(groups) < 2 or len(alike) < SMALL:
        return None
    of_each = (i for some in itertools.zip_longest(*groups.values()) for i in some if i is not None)
    if not is_independent(s.mixture(), list(itertools.islice(of_each, SMALL))):
        return None
    same = replace(s, data=View(s.data, alike))
    gap, leak, _ = _mixture(same)
    whole = _whole_batch(same, n=min(n, len(alike)))
    gap, leak = max(gap, whole[0]), max(leak, whole[1])
    return (gap, leak) if max(gap, leak) <= s.limit else None


def _in_direction(s: Samples) -> bool:
    """Return whether each sample's input gradient in a batch is its own times its share of the weight, as where class weights of pixels
    make the loss a mean over weights. Only for class numbers: the gradients of single numbers have one direction whatever the loss mixes."""
    indices = s.pick(SMALL)
    batch = s.read(indices)
    targets = [batch.get(k) for k, f in s.data.fields.items() if f.role == "target"]
    if s.run.world > 1 or not targets or not all(isinstance(y, Tensor) and y.dtype == torch.int64 for y in targets):
        return False
    together = _input_gradients(s, batch)[1]
    factors = []
    for j, i in enumerate(indices):
        alone = _input_gradients(s, s.read([i]))[1]
        pairs = [(together[key][j : j + 1], own) for key, own in alone.items()]
        if not pairs or any(row.shape != own.shape for row, own in pairs):
            return False
        row, own = (torch.cat([x.flatten() for x in side]) for side in zip(*pairs, strict=True))
        if not row.any() or not own.any() or (row / row.norm() - own / own.norm()).norm() > s.limit:
            return False
        factors.append((row.norm() / own.norm()).item())
    return abs(sum(factors) / len(factors) - 1) <= s.limit  # the loss of a batch is its mean times its samples


def _weighted_beside_others(s: Samples) -> bool:
    """Return whether the loss is a mean with weights (class weights of tokens) next to a plain mean of other terms, of samples that the
    model treats independently."""
    indices, mixture = s.pick(SMALL), s.mixture()
    batch = mixture.read(indices)
    targets = [batch.get(k) for k, f in s.data.fields.items() if f.role == "target"]
    kinds = [y.dtype for y in targets if isinstance(y, Tensor)]  # of a trainer whose collator runs later, lists
    if s.run.world > 1 or torch.int64 not in kinds or len(indices) < SMALL or not is_independent(mixture, indices):
        return False

    def mean(some: Sequence[int]) -> float:
        return mixture.loss(some) / s.stage.counts(mixture.read(some))["loss"]

    return is_weighted_mean(mean, indices, 1e-9 if s.double else 1e-6)


def _whole_batch(s: Samples, *, n: int) -> tuple[float, float, str]:
    """Compare one batch of `n` samples, as large as the run's, with the same samples four at a time: (difference of the
    loss, difference of the gradients, which rows were exchanged). Gradients are with respect to floating-point inputs,
    else (token ids) to the weights."""
    indices = s.pick(n)
    batch = s.read(indices)
    weights = not any(f.role == "input" and _floating(batch.get(k)) for k, f in s.data.fields.items())
    look = _weight_gradients if weights else _input_gradients
    loss, grads = look(s, batch)
    if abs(loss - look(s, batch)[0]) > s.limit * abs(loss):
        return 0.0, 0.0, ""  # random draws in eval mode: the smaller batches already reported them
    quarters = [indices[i : i + 4] for i in range(0, n, 4)]
    parts = [(part, look(s, s.read(part))) for part in quarters]
    rows = sum(found[0] for _, found in parts)
    if weights:
        whole = {k: sum(found[1][k] for _, found in parts) for k in grads}
    else:
        whole = {k: torch.zeros_like(g) for k, g in grads.items()}
        for at, (part, found) in zip(range(0, n, 4), parts, strict=True):
            for k, own in found[1].items():
                whole[k][(slice(at, at + len(part)), *map(slice, own.shape[1:]))] = own
    gap, leak = abs(loss - rows) / max(abs(loss), 1e-8), _largest_difference(grads, whole)
    if max(gap, leak) <= s.limit:
        return gap, leak, ""
    padding = _beside_longest(s, indices)
    counted = explain_calls(s.mixture(), indices) if s.run.world == 1 else ""
    return gap, leak, padding or counted or _mixed_up(s, indices)


def _beside_longest(s: Samples, indices: list[int]) -> str:
    """Return that padding is not masked, if the longest sample of a batch changes the shortest ones: in a batch of four all may be of one
    length."""
    samples = {i: s.data.get(i, None) for i in indices}
    sizes = {i: sum(getattr(v, "nbytes", 0) for v in sample.values()) for i, sample in samples.items()}
    some = sorted(indices, key=lambda i: sizes[i])
    if s.run.world > 1 or sizes[some[0]] == sizes[some[-1]]:
        return ""
    cause = explain_mixed_samples(s.mixture(), [some[-1], *some[:3]], mean=False)
    return f"{cause}\n" if cause.startswith("padding is not masked") else ""


def _mixed_up(s: Samples, indices: list[int]) -> str:
    """Return the entry of a collated batch whose rows differ from its samples collated alone."""
    for key, value in fetch(s.data, indices, s.seed, s.run.device).items():
        if not isinstance(value, Tensor) or value.dim() == 0 or len(value) != len(indices):
            continue
        for j, i in enumerate(indices):
            own = fetch(s.data, [i], s.seed, s.run.device).get(key)
            if not isinstance(own, Tensor) or own.shape[1:] != value.shape[1:]:
                break  # the longer part is padding
            if not torch.equal(own[0], value[j]):
                return (f"collate() mixes up rows: in a batch of {len(indices)}, row {j} of '{key}' is not that of its sample; in "
                        "batches of four it is\n")  # fmt: skip
    return "something that only happens in large batches: the smaller ones are sums over their samples\n"


def _floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _mixture(s: Samples) -> tuple[float, float, bool]:
    """(difference of the loss, difference of the input gradients, whether the loss is a mean) of the median of three
    draws of four samples."""
    size, limit = max(2, s.stage.expect.at_most(4)), s.limit
    picked = s.pick(3 * size)
    trials = []
    for indices in (picked[i : i + size] for i in range(0, len(picked), size)):
        batch = s.read(indices)
        together, again = _input_gradients(s, batch), _input_gradients(s, batch)
        if abs(together[0] - again[0]) > limit * abs(together[0]) or _largest_difference(together[1], again[1]) > limit:
            raise Skip(
                "the loss of one batch differs from call to call in eval mode (see evaluation): nothing to compare"
            )
        alone = [_input_gradients(s, s.read([i])) for i in indices]
        loss, rows = together[0], sum(a[0] for a in alone)
        gap = abs(loss - rows) / max(abs(loss), 1e-8)
        leak = _largest_difference(
            together[1], {k: _rows([a[1][k] for a in alone], whole) for k, whole in together[1].items()}
        )
        mean = gap > limit and abs(loss * len(indices) - rows) <= limit * abs(rows)
        trials.append((max(gap, leak), gap, leak, mean))
        if len(trials) == 2 and (trials[0][0] > limit) == (trials[1][0] > limit):
            break  # a third draw would not change on which side the median is
    # A mixture shows in every draw; with few samples there is only one draw
    return sorted(trials)[len(trials) // 2][1:]


def _rows(alone: list[Tensor], whole: Tensor) -> Tensor:
    """Stack gradients of single samples as rows of the whole batch. Cut each to its own length, since the rest was
    padding."""
    rows = torch.zeros_like(whole)
    for row, own in zip(rows, alone, strict=True):
        row[tuple(map(slice, own.shape[1:]))] = own[0]
    return rows


def _largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Largest relative difference of two sets of gradients. Relative to the larger: `x - x.mean(0)` has none for a batch of one.
    Gradients that are tiny compared with the others are rounding (the bias of an attention's keys has none in theory)."""
    gaps = [0.0]
    least = TINY * max((g.norm().item() for g in a.values()), default=0.0)
    for key, one in a.items():
        size = max(one.norm().item(), b[key].norm().item(), least)
        if one.shape == b[key].shape and size > 0:
            gaps.append((one - b[key]).norm().item() / size)
    return max(gaps)


def _input_gradients(s: Samples, batch: dict) -> tuple[float, dict[str, Tensor]]:
    """(sum of the loss terms, gradient with respect to every floating-point input) in eval mode."""
    inputs = {k: batch[k].detach().clone().requires_grad_() for k, f in s.data.fields.items()
              if f.role == "input" and isinstance(batch[k], Tensor) and batch[k].is_floating_point()}  # fmt: skip
    with evaluating(s.stage.model), torch.set_grad_enabled(bool(inputs)), s.run.autocast():
        loss = sum(s.stage.loss(s.stage.model, {**batch, **inputs}).values())
        grads = torch.autograd.grad(loss, list(inputs.values()), allow_unused=True) if inputs else []
    return loss.item(), {k: torch.zeros_like(batch[k]) if g is None else g for k, g in zip(inputs, grads, strict=True)}


def _weight_gradients(s: Samples, batch: dict) -> tuple[float, dict[str, Tensor]]:
    """(sum of the loss terms, its gradient with respect to every trained parameter) in eval mode."""
    stage, own = s.stage, dict(s.stage.model.named_parameters())
    # by name, because a copy of the model holds other tensors than the optimiser
    used = {n: own[n] for n in stage.parameters() or own if own[n].requires_grad}
    with evaluating(stage.model), torch.enable_grad(), s.run.autocast():
        loss = sum(stage.loss(stage.model, batch).values())
        grads = torch.autograd.grad(loss, list(used.values()), allow_unused=True)
    return loss.item(), {n: g for n, g in zip(used, grads, strict=True) if g is not None}
