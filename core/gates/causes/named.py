"""Finds the likely cause that a measurement supports. A gate puts it first among its causes; if there is none, the fixed
list is printed as it is.

Functions return a cause with the number that supports it, or "".
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from trainworthy.core.base import seeds
from trainworthy.core.base.modes import hooked, in_mode
from trainworthy.core.data.field_statistics import rescaled
from trainworthy.core.gates.causes.gradient import MOST
from trainworthy.core.recipe.stage import Field

SAME = 1e-3  # relative difference up to which two numbers are the same one
BYTE = 255
PLACES, FEWEST = 32, 4  # of a target that are tried; from how many on


# ----------------------------------------------------------------------------------------------------------------- data
def order_causes(*causes: tuple[bool, str]) -> str:
    """Return the causes, one per line, given as (whether its symptom was measured, cause). Those with a measured symptom come first."""
    return "\n".join(text for _, text in sorted(causes, key=lambda one: not one[0]))


def explain_labels(spec: Field, found: dict[str, Any], empty_elsewhere: Sequence[set[str]]) -> str:
    """Return the cause of invalid class ids, or of classes without a sample. `empty_elsewhere`: classes without a sample in each other
    split."""
    classes = list(spec.classes or ())
    counts = found.get("classes", {})
    empty, invalid = {c for c in classes if counts.get(c, 1) == 0}, set(map(str, found.get("invalid") or ()))
    if invalid == {str(len(classes))} and classes[0] in empty:
        return f"labels count from 1: id {len(classes)} occurs and id 0 does not"
    if invalid:
        return f"labels are ids of another list of classes: {', '.join(sorted(invalid)[:3])}, where {len(classes)} classes are declared"
    if not empty:
        return ""
    some = ", ".join(c for c in classes[:50] if c in empty)[:80]
    if empty_elsewhere and all(empty == other for other in empty_elsewhere):
        shifted = " (its id is 0: are the others shifted by one?)" if empty == {classes[0]} else ""
        return f"the list of classes has one that no split uses: {some}{shifted}"
    together = empty.union(*empty_elsewhere)
    if len(classes) > 2 and together == set(classes) and not any(empty & other for other in empty_elsewhere):
        return "the data were sorted by class before they were split: no class is in both splits"
    return f"the split, or a filter after it, leaves {some} out: draw the split at random, or from each class"


def explain_range(spec: Field, found: dict[str, Any]) -> str:
    """Return the cause of values outside their declared range, or in a small part of it."""
    if spec.low is None or spec.high is None or "max" not in found:
        return ""
    wide, seen = spec.high - spec.low, found["max"] - found["min"]
    if spec.low == 0 and found["max"] > spec.high and 0.5 * BYTE < seen / wide <= BYTE * (1 + SAME):
        return f"values are 0 to {BYTE}, where 0 to {spec.high:g} is declared: they were not divided by {BYTE}"
    if spec.low == 0 and seen and 0.5 < seen * BYTE / wide <= 1 + SAME:
        return f"values were divided by {BYTE} twice: {BYTE} times the largest is {found['max'] * BYTE:.3g}"
    if found["min"] < spec.low and found["max"] > spec.high and abs(sum(found.get("mean", [math.inf]))) < wide / 4:
        return "values were normalised already (mean near 0): the declared range is that of raw ones"
    if found.get("shape", {}).get("max") == [] and seen < wide / 10:  # one number a sample: a timestep, a level
        if not seen:
            return (
                f"it is {found['min']:g} in every sample: a constant, or drawn from a seed that is not the sample's own"
            )
        if found["min"] >= spec.low and found["max"] <= spec.high:
            return f"it is {found['min']:g} to {found['max']:g}: drawn to the bound of another setting, or clipped"
    return ""


def explain_split_scales(train: dict[str, Any], val: dict[str, Any], spec: Field) -> str:
    """Return the cause of inputs on another scale in validation than in training."""
    if spec.low is not None and spec.high is not None:
        pairs = list(zip(train["mean"], train["std"], val["mean"], val["std"], strict=True))
        flipped = [
            abs(spec.low + spec.high - mt - mv) < 0.1 * st and abs(sv / st - 1) < 0.1 for mt, st, mv, sv in pairs if st
        ]
        if flipped and all(flipped) and max(abs(mt - mv) / st for mt, st, mv, _ in pairs if st) > 1:
            return "validation inputs are inverted (high for low): their mean is the mirror image of training's, their spread the same"
    ratio = val["std"][0] / train["std"][0] if train["std"][0] else 0.0
    for factor, how in ((BYTE, f"not divided by {BYTE}"), (1 / BYTE, f"divided by {BYTE} once more")):
        if abs(ratio / factor - 1) < 0.2:
            return f"validation inputs are {how} (spread {ratio:.3g} times that of training)"
    if rescaled(train, val) and (train["min"] < 0) != (val["min"] < 0):
        names = ("training", "validation") if train["min"] < 0 else ("validation", "training")
        return "{} inputs are normalised (they have negative values), and {} inputs are not".format(*names)
    return "the splits are read by different code, or are different data: validation inputs are on another scale"


def explain_path_scales(mean: float, std: float, other_mean: float, other_std: float, spec: Field) -> str:
    """Return the cause of inputs on another scale on the training path than on the evaluation path."""
    ratio = std / other_std if other_std else 0.0
    mirrored = mean if spec.low is None or spec.high is None else spec.low + spec.high - mean
    if abs(mirrored - other_mean) < 0.1 * other_std < other_std < abs(mean - other_mean) and abs(ratio - 1) < 0.2:
        return "the training path inverts its inputs (high for low) and the evaluation path does not: their means are mirror images"
    for factor, how in ((BYTE, f"lacks a division by {BYTE}"), (1 / BYTE, f"divides by {BYTE} once more")):
        if abs(ratio / factor - 1) < 0.2:
            return f"the training path {how} (spread {ratio:.3g} times that of the evaluation path)"
    if abs(mean) < 0.25 and 0.5 < std < 2 and not (abs(other_mean) < 0.25 and 0.5 < other_std < 2):
        return "the training path normalises its inputs and the evaluation path does not"
    if abs(other_mean) < 0.25 and 0.5 < other_std < 2:
        return "the evaluation path normalises its inputs and the training path does not"
    return ""


# ----------------------------------------------------------------------------------------------------------- first loss
def explain_uniform_outputs(measured: float, half: float, expected: float, samples: int) -> str:
    """Return the cause of an untrained loss that is the logarithm of another number than that of the classes. `half`: the loss of half
    of the samples. It is the same if all outputs are equally likely, and differs otherwise."""
    heads, due, fewer = (round(math.exp(x)) if 0 < x < 20 else 0 for x in (measured, expected, half))
    # Logarithms of neighbouring whole numbers differ by about 1 / k; agreement to a hundredth of that is no accident.
    even = [k >= 2 and abs(math.log(k) - x) <= 0.01 / k for k, x in ((heads, measured), (due, expected), (fewer, half))]
    if heads == due or not all(even):
        return ""
    if heads == samples and fewer == samples // 2:
        return f"the softmax runs over the {samples} samples of the batch, not over {due} classes: the loss is ln {samples}"
    if heads == fewer:
        return f"the number of outputs is not the number of classes: the loss is ln {heads}, of {due} classes ln {due}"
    return ""


def published_loss(measured: float, expected: float) -> str:
    """Return the published loss that equal outputs have this value of, where cross-entropy is expected; "" if none has."""
    p = math.exp(-expected)  # of each class
    known = {f"the focal loss of gamma {g:g}": (1 - p) ** g * expected for g in (0.5, 1, 1.5, 2, 2.5, 3, 4, 5)}
    known |= {
        "poly-1 (Leng 2022)": expected + 1 - p,
        "the generalised cross-entropy of q 0.7 (Zhang 2018)": (1 - p**0.7) / 0.7,
    }
    return next((name for name, value in known.items() if math.isclose(measured, value, rel_tol=1e-4)), "")


def compared_by_a_gate(gates: Sequence[Any], measured: float, expected: float) -> str:
    """Return which gate compares a loss of another form, of equal outputs, with its formula or its declared weights; "" if none does, or if
    the values are so far apart that it would not take one for a multiple of the other."""
    found = next((one.id for one in gates if one.compares_loss), "")
    near = 0.1 <= measured / expected <= 10 if expected else False
    return f"another form, of equal outputs: `{found}` compares it" if found and near else ""


def initial_loss_causes(measured: float, half: float | None, *, equal: bool = False) -> str:
    """Return the likely causes of another untrained loss than declared, one a line. `half`: the loss of half of the samples. If it is the
    same, the outputs hardly differ between samples. `equal`: all outputs are one number, whatever the loss of half is (class weights)."""
    outputs = "the number of outputs is not the number of classes\nthe loss is a sum where it should be a mean, or the other way round"
    same = half is not None and math.isclose(measured, half, rel_tol=1e-5)
    if same or equal:
        why = "half of the samples have the same loss" if same else "all outputs are equal"
        return (
            f"another loss on purpose: set `initial_loss={measured:.4g}` in the stage's core.Expect (None: not compared); {why}, so large "
            f"initial weights are unlikely\n{outputs}"
        )
    return (
        "the last layer's initial weights are too large, so logits differ between classes (use zero or small ones)\n"
        f"{outputs}\nanother loss on purpose: set `initial_loss` of the stage's core.Expect to its value before training "
        "(None: not compared)"
    )


# -------------------------------------------------------------------------------------------------------------- overfit
def explain_ignored_input(model: nn.Module, loss: Callable[[dict], Tensor], batch: dict, inputs: Sequence[str]) -> str:
    """Return why samples are not memorised, if their gradient does not depend on which input belongs to which sample."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    turned = {k: batch[k].roll(1, 0) for k in inputs if isinstance(batch.get(k), Tensor) and batch[k].ndim}
    if not turned or not parameters or sum(p.numel() for p in parameters) > MOST:
        return ""

    def gradient(batch: dict) -> list[Tensor]:
        with in_mode(model, training=False), torch.enable_grad():
            total = loss(batch)
            found = torch.autograd.grad(total, parameters, allow_unused=True) if total.requires_grad else []
        return [g.detach().float() for g in found if g is not None]

    own, other = gradient(batch), gradient({**batch, **turned})
    size = math.sqrt(sum(float(g.square().sum()) for g in own))
    if not size:
        return "no gradient arrives at any parameter: it is exactly 0"
    difference = math.sqrt(sum(float((a - b).square().sum()) for a, b in zip(own, other, strict=True))) / size
    if difference < 1e-5:
        return (f"the input does not reach the loss: with the inputs of other samples its gradient is the same (to {difference:.0e}, "
                "relative)")  # fmt: skip
    return ""


def explain_redrawn(model: nn.Module, loss: Callable[[dict], Tensor], batch: dict) -> str:
    """Return that the loss draws random numbers itself, so that fixed samples are never the same: two calls in eval mode differ."""
    seen = []
    for seed in (1, 2):
        seeds.seed_global(seed)
        with in_mode(model, training=False), torch.no_grad():
            seen.append(loss(batch).item())
    if abs(seen[0] - seen[1]) <= 0.01 * max(map(abs, seen)):
        return ""
    return (f"the loss draws random numbers at each call (noise, timesteps, a mask): on one batch it is {seen[0]:.3g} and {seen[1]:.3g} without "
            "dropout, so that fixed samples cannot be memorised; draw them in Data.get, with the sample's generator")  # fmt: skip


def explain_infinite_loss(model: nn.Module, batch: dict, terms: dict[str, Tensor]) -> str:
    """Return that the formula of the loss makes NaN or infinity: inputs and weights are finite."""
    bad = [name for name, value in terms.items() if isinstance(value, Tensor) and not torch.isfinite(value).all()]
    given = [x for x in (*batch.values(), *model.parameters()) if isinstance(x, Tensor) and x.is_floating_point()]
    if not bad or not all(torch.isfinite(x).all() for x in given):
        return ""
    return (f"the loss is {float(terms[bad[0]].detach().sum())} although inputs and weights are finite: the logarithm or the root of a negative "
            "number or of 0, a division by 0, exchanged arguments of a loss (kl_div(log-probabilities, target probabilities))")  # fmt: skip


def explain_unread_places(loss: Callable[[dict], Tensor], batch: dict, targets: Sequence[str]) -> str:
    """Return that the loss reads half of a target's places or fewer: that many change it when their class numbers are exchanged.
    Places that are ignored (negative) do not count."""
    for key in targets:
        value = batch.get(key)
        if not isinstance(value, Tensor) or value.dtype != torch.int64 or value.dim() < 2 or value[0].numel() < FEWEST:
            continue
        flat, known = value.flatten(1), value[value >= 0].unique()
        places = torch.linspace(0, flat.shape[1] - 1, min(PLACES, flat.shape[1])).long().tolist()
        places = [p for p in places if (flat[:, p] >= 0).any()]
        read = 0
        with torch.no_grad():
            before = loss(batch).item()
            for p in places if len(known) > 1 else ():
                changed = flat.clone()
                other = known[(torch.searchsorted(known, flat[:, p].contiguous()) + 1) % len(known)]
                changed[:, p] = torch.where(flat[:, p] >= 0, other, flat[:, p])
                read += loss({**batch, key: changed.view_as(value)}).item() != before
        if len(places) >= FEWEST and 0 < read <= len(places) / 2:
            return f"the loss reads {read} of {len(places)} places of '{key}' that were tried; the metric scores the others, too"
    return ""


def explain_untrained_base(model: nn.Module, batch: dict) -> str:
    """Return why adapters do not memorise samples, if the untrained language model below them gives all tokens the same probability."""
    ids = batch.get("input_ids")
    if not hasattr(model, "get_output_embeddings") or not isinstance(ids, Tensor):
        return ""
    with in_mode(model, training=False), torch.no_grad():
        logp = model(input_ids=ids.flatten(0, -2)[:2, :64]).logits.float().log_softmax(-1)
    if logp.shape[-1] < 2:  # a reward, not tokens
        return ""
    share = float(-(logp.exp() * logp).sum(-1).mean()) / math.log(logp.shape[-1])
    if share < 0.97:
        return ""
    return (f"the model below the adapters has random weights: all its tokens are about equally likely (entropy {share:.1%} of the "
            "largest possible); adapters do not change that: --lora-rank 0, or a trained --model")  # fmt: skip


def explain_silent_steps(silent: Sequence[bool]) -> str:
    """Return why parameters got no gradient, if there was none at all in at least half of the steps, but in some. What moves only after
    another part has moved (the first matrix of an adapter) needs two steps with one."""
    if not len(silent) / 2 <= sum(silent) < len(silent):  # in all of them: the loop lost the gradient
        return ""
    return (f"in {sum(silent)} of {len(silent)} steps every gradient was exactly 0: their samples teach nothing (all answers of a group earn the "
            "same reward, because they are cut, too hard or too easy; or no target counts)")  # fmt: skip


def explain_double_softmax(reached: float, classes: int, smoothing: float) -> str:
    """Return the cause of a loss that stops at the lowest cross-entropy of probabilities: ln(e + n - 1) - 1 for n classes, without
    smoothing."""
    if classes < 2 or not math.isfinite(reached):
        return ""
    least = math.log(math.e + classes - 1) - (1 - smoothing) - smoothing / classes
    if abs(reached - least) > 0.02 * least:
        return ""
    return (f"softmax before cross-entropy: the loss stops at {reached:.3f}, and that of probabilities of {classes} classes cannot be "
            f"below {least:.3f}")  # fmt: skip


# ----------------------------------------------------------------------------------------------------------- evaluation
def explain_batched_metric(whole: float, parts: Sequence[float], sizes: Sequence[int]) -> str:
    """Return how `whole`, a metric that depends on the evaluation's batches, follows from `parts`, the metrics of each batch alone."""
    if len(parts) < 2 or max(parts) - min(parts) <= SAME * max(map(abs, parts)):
        return ""
    close = lambda value: abs(value - whole) <= SAME * max(1e-6, abs(whole))  # noqa: E731
    mean = sum(parts) / len(parts)
    weighted = sum(p * n for p, n in zip(parts, sizes, strict=True)) / sum(sizes)
    if close(mean) and not close(weighted):
        return f"a mean over batch means: the {len(parts)} batches' own values have the mean {mean:.5f}, small batches count as much"
    if close(parts[-1]):
        return f"the last batch alone counts: its own value is {parts[-1]:.5f}"
    if close(parts[0]):
        return f"the first batch alone counts: its own value is {parts[0]:.5f}"
    if close(sum(parts)):
        return f"values of batches are added and not averaged: their sum is {sum(parts):.5f}"
    return ""


@contextlib.contextmanager
def random_in_training(model: nn.Module) -> Iterator[list[str]]:
    """Yield a list that collects the dropout and batch norm modules which run in train mode inside."""
    kinds = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm)
    seen: list[str] = []

    def note(name: str) -> Callable:
        return lambda module, _: seen.append(name) if module.training else None

    found = [(name, m) for name, m in model.named_modules() if isinstance(m, kinds)]
    with hooked(m.register_forward_pre_hook(note(name)) for name, m in found):
        yield seen


def explain_random_evaluation(same_samples: bool, training: Sequence[str]) -> str:
    if not same_samples:
        return "random augmentation on the evaluation path: two reads of the same samples differ"
    if training:
        names = sorted(set(training))
        return f"evaluation runs in train mode: {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''} (dropout or batch norm)"
    return ("dropout without its training flag (F.dropout), or another draw in the forward: samples are the same, and no dropout module "
            "is in train mode")  # fmt: skip


# --------------------------------------------------------------------------------------------------------- accumulation
def explain_micro_batches(
    gaps_of_first: float, factor: float | None, parts: int, *, mean: bool, equal_agree: bool
) -> str:
    """Return the cause of a gradient that depends on the division into micro-batches. `gaps_of_first`: its relative difference from the gradient of
    the first micro-batch alone; `factor`: the multiple of the whole batch's gradient that it is; `mean`: the loss of twice as many
    equal samples is the same; `equal_agree`: micro-batches of equal size give the whole batch's gradient."""
    if gaps_of_first < SAME:
        return f"the first of {parts} micro-batches alone counts: a loop that ignores step.batches[1:] (relative difference {gaps_of_first:.0e})"
    if mean:
        return "the loss is a mean over its samples (twice as many equal samples have the same loss): return SUMS"
    if equal_agree:
        return "micro-batches are averaged although their sizes differ: equal ones agree with the whole batch, unequal ones do not"
    if factor is not None and abs(factor - parts) < SAME * parts:
        return f"each of {parts} micro-batches counts as a whole step: the gradient is {factor:.3g} times that of the whole batch"
    if factor is not None and abs(factor - 1) > SAME:
        return f"micro-batches are scaled: the gradient is {factor:.3g} times that of the whole batch"
    return ""
