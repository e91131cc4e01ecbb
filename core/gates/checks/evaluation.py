"""The gate on evaluation: it is repeatable, and leaves weights, buffers and modes as they were."""

import contextlib
import math
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch import Tensor
from trainworthy.core.base import seeds
from trainworthy.core.base.verdict import Finding, Skip
from trainworthy.core.gates import gate
from trainworthy.core.gates.causes.named import explain_batched_metric, explain_random_evaluation, random_in_training
from trainworthy.core.gates.checks.learning import overfitted
from trainworthy.core.gates.checks.left_out import SAMPLES, left_out
from trainworthy.core.gates.checks.model_inputs import compare_inputs
from trainworthy.core.gates.fingerprints import fingerprint, tensors
from trainworthy.core.gates.gate import GateContext, pick
from trainworthy.core.gates.recorder import Record, rehearsed
from trainworthy.core.loop.run import Run
from trainworthy.core.recipe.stage import Data, Stage, View

Results = tuple[dict[str, float], ...]
KEPT = (
    "evaluate() keeps something between its calls (a metric or a list that is not reset, a generator of its own): a second "
    "call with the same samples, seed and batches gives another result"
)
TOGETHER = (
    "how much a sample counts depends on the others in its batch: some samples are left out (episodes that end last, an incomplete batch), scores "
    "are ranked or normalised within the batch, or padding to the longest sample is not masked"
)


@gate(
    "evaluation",
    rows="C12 V2",
    title="evaluation is repeatable and changes nothing",
    reads="data model loss evaluate metric state train",
    compares_ranks=True,
)
def evaluation(context: GateContext) -> Finding:
    """Evaluate the same weights under two seeds in batches of two sizes. The result must be the same (else a further
    run finds which of the two changed it), and weights, buffers and modes unchanged. After the evaluation inside
    `train()`, training must continue in train mode."""
    run, stage, record = rehearsed(context)
    if stage.expect.nondeterministic:
        raise Skip(stage.expect.nondeterministic)
    if "train" in stage.data:  # use trained weights: an untrained model scores at chance whatever is wrong
        run, stage, _ = overfitted(context)
    val = stage.data["val"]
    view = View(val, pick(val, min(len(val), stage.expect.at_most(250, times=2)), context.cfg.run.seed))
    # Fingerprints: copies would need as much memory again
    before = {n: fingerprint(t) for n, t in tensors(stage, ("state",)).items()}
    modes = {n: m.training for n, m in stage.eval_model.named_modules()}

    def measure(seed: int, size: int) -> dict[str, float]:
        seeds.seed_global(seed)
        with mock.patch.object(run.cfg.train, "eval_batch_size", size):
            return run.measure(stage, view)

    size = run.cfg.train.eval_batch_size
    other = max(3, len(view) // 5 - 2)  # 48 of 250: an unusual batch size, with an incomplete last batch
    other = max(1, min(other, len(view) - 1))  # also with only three samples
    with random_in_training(stage.eval_model) as training:
        first = measure(1, size)
        # Too few for the metric; what it leaves behind shows in the next evaluation
        with contextlib.suppress(Exception):
            run.measure(stage, View(view, range(0, len(view), 2)))
        cut_other = measure(2, other)
        second = first if cut_other == first else measure(2, size)
    unequal = _unequal(run, stage, view, training, (first, second, cut_other), (size, other), lambda: measure(1, size))
    changed = _changed_by_evaluation(before, stage, training)
    found = [fault for fault in (unequal, changed) if fault]
    if any(modes[n] != m.training for n, m in stage.eval_model.named_modules()):
        found.append(("evaluation left modules in another mode",
                      "evaluate() calls train() or eval() of the model and does not put the mode back"))  # fmt: skip
    found += _left_in_training(record)
    if "train" in stage.data:
        some = pick(stage.data["train"], stage.expect.at_most(8), run.cfg.run.seed)
        # Too few samples for the metric
        with contextlib.suppress(RuntimeError, ValueError, IndexError, KeyError, TypeError):
            found += [fed] if (fed := compare_inputs(run, stage, some)) else []
        if not found:
            with contextlib.suppress(RuntimeError, ValueError, IndexError, KeyError, TypeError):
                found += _unscored(left_out(run, stage, val, view.indices))
    wrong = [what for what, _ in found]
    # First: what changes under an evaluation makes the next one differ.
    causes = [cause for _, cause in sorted(found, key=lambda fault: fault is not changed)]
    cuts = f"in batches of {min(size, len(view))} and of {other}"
    measured = f"{stage.metric.name} {first[stage.metric.name]:.4f} {cuts}, nothing changed"
    return Finding(
        not wrong, "; ".join(wrong) if wrong else measured,
        f"identical results under two seeds, the same in batches of {other}, no tensor or mode changed, train mode while training",
        "dropout without its training flag, or batch norm in train mode, at evaluation\n"
        "random augmentation on the evaluation path\nmodel.eval() without model.train() after it in train()\n"
        "an average copied into the model for its evaluation, and the raw weights not put back\n"
        "a mean over batch means", evidence={"first": first, "second": second, f"batches_of_{other}": cut_other},
        cause=next(filter(None, causes), ""),
    )  # fmt: skip


def _unequal(
    run: Run,
    stage: Stage,
    view: View,
    training: list[str],
    results: Results,
    sizes: tuple[int, int],
    again: Callable[[], dict[str, float]],
) -> tuple[str, str] | None:
    """Return (what is wrong, cause) if evaluations of the same weights differ. `results`: with one seed, with another seed, and with
    batches of the second of the two `sizes`. `again` repeats the first."""
    (first, second, cut_other), (size, other) = results, sizes
    differs = [k for k in first if first[k] != second[k] and first[k] == first[k]]
    if differs:
        k = differs[0]
        keeps = not training and _same_samples(view) and again()[k] != first[k]
        cause = KEPT if keeps else explain_random_evaluation(_same_samples(view), training)
        return f"two evaluations of the same weights differ: {k} {first[k]:.5f} and {second[k]:.5f}", cause
    limit = 1e-3 if run.precision == "fp32" else 5e-2  # kernels for other shapes round differently
    k = next((k for k in first if abs(first[k] - cut_other[k]) > limit * max(1.0, abs(first[k]))), None)
    if k is None:
        return None
    parts = [range(a, min(a + other, len(view))) for a in range(0, len(view), other)]
    alone = [run.measure(stage, View(view, part)).get(k, math.nan) for part in parts]
    cause = explain_batched_metric(cut_other[k], alone, [len(part) for part in parts])
    cause = cause or (explain_random_evaluation(True, training) if training else TOGETHER)
    return f"{k} depends on the evaluation batch size: {first[k]:.5f} at {size}, {cut_other[k]:.5f} at {other}", cause


def _unscored(samples: list[int]) -> Iterator[tuple[str, str]]:
    """(what is wrong, cause) of held-out samples that no metric depends on."""
    if samples:
        yield (f"the labels of {len(samples)} of {SAMPLES} held-out samples have no influence on any score, whichever class they are "
               f"(for example sample {samples[0]})",
               "evaluate() leaves samples out before it scores (by confidence, a threshold, a mask or a slice), and reports the rest as "
               "all: score every sample, or report the share that is scored")  # fmt: skip


def _changed_by_evaluation(before: dict[str, Tensor], stage: Stage, training: list[str]) -> tuple[str, str] | None:
    """(what is wrong, cause) of tensors that an evaluation changed."""
    after = tensors(stage, ("state",))
    changed = [n for n, t in before.items() if n not in after or not torch.equal(t, fingerprint(after[n]))]
    if not changed:
        return None
    running = sorted({n for n in training if n and changed[0].startswith(("model." + n, n))})
    cause = f"evaluation writes to {changed[0]}: statistics or weights are updated in evaluate()"
    return (f"evaluation changed {len(changed)} tensors, e.g. {changed[0]}",
            f"batch norm in train mode at evaluation: {running[0]}" if running else cause)  # fmt: skip


def _left_in_training(record: Record) -> Iterator[tuple[str, str]]:
    """(what is wrong, cause) of what `train()` goes on with after an evaluation, which it runs after the second step."""
    swapped = record.between.get(2, [])
    if swapped and not record.between.get(1) and not record.between.get(3):
        yield (f"train() continues with other weights than before the evaluation: {len(swapped)} tensors, e.g. {swapped[0]}",
               "an average copied into the model for its evaluation, and the raw weights not put back")  # fmt: skip
    if record.evaluating:
        yield (f"train() runs the model in eval mode (first at step {record.evaluating[0]}, the evaluation was after step 2)",
               f"model.eval() without model.train() after it in train(): from step {record.evaluating[0]} on")  # fmt: skip


def _same_samples(data: Data) -> bool:
    """Return whether two reads of some samples on the evaluation path are equal, under two states of the global generators."""
    some, read = range(min(8, len(data))), []
    for seed in (1, 2):
        seeds.seed_global(seed)
        read.append([data.get(i, None) for i in some])
    return all(torch.equal(a[k], b[k]) for a, b in zip(*read, strict=True) for k in a if isinstance(a[k], Tensor))
