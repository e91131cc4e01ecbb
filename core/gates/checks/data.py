"""Gates on the data: schema, inventory."""

import json
from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor
from trainworthy.core.base.verdict import Finding
from trainworthy.core.data import (
    characters,
    contents,
    detail,
    inventory,
    neighbours,
    pairing,
    texts,
    turned,
)
from trainworthy.core.data.field_statistics import rescaled
from trainworthy.core.gates import gate
from trainworthy.core.gates.causes import named
from trainworthy.core.gates.checks import paths
from trainworthy.core.gates.gate import GateContext, fetch, own_size, pick, split_evenly, train_set
from trainworthy.core.gates.recorder import training_samples
from trainworthy.core.loop.run import Run, evaluating
from trainworthy.core.loop.update import refuse_unnamed
from trainworthy.core.recipe.stage import Data, Field, Metric, Stage, View

LENGTHS, ENOUGH = 4, 8  # samples whose shapes are compared; different ones whose scales are


@gate(
    "schema",
    rows="C7 V2",
    title="two samples form a batch, repeatably, and the loss accepts it",
    reads="data model loss counts evaluate metric probe",
)
def schema(context: GateContext) -> Finding:
    """Shapes, dtypes and names agree over samples and splits. A sample depends on its key alone. Loss, counts and
    evaluation return what core expects."""
    run, stage = context.look()
    wrong: list[str] = []
    batch = None
    for name, data in stage.data.items():
        two = pick(data, 2, context.cfg.run.seed)
        seed = context.cfg.run.seed
        torch.manual_seed(1)
        first = fetch(data, two, seed, run.device)
        torch.manual_seed(2)
        again = fetch(data, two, seed, run.device)
        batch = batch or first
        for key in data.fields:
            if key not in first:
                wrong.append(f"{name}: no field '{key}' in the batch (found: {', '.join(first)})")
            elif isinstance(first[key], Tensor) and not torch.equal(first[key], again[key]):
                wrong.append(f"{name}: '{key}' of one sample differs between two reads with one seed")
        plain = fetch(data, two, None, run.device)
        for key, value in first.items():
            if isinstance(value, Tensor) and value.shape[:1] != (2,):
                wrong.append(f"{name}: '{key}' of two samples has shape {tuple(value.shape)}")
            if isinstance(value, Tensor) and (
                value.dtype != plain[key].dtype
                or (value.shape[1:] != plain[key].shape[1:] and not _of_any_length(data, key, value, plain[key], run))
            ):
                wrong.append(f"{name}: '{key}' is {value.dtype} {tuple(value.shape[1:])} in training, "
                             f"{plain[key].dtype} {tuple(plain[key].shape[1:])} in evaluation")  # fmt: skip
        again_plain = fetch(data, two, None, run.device)
        if any(isinstance(v, Tensor) and not torch.equal(v, again_plain[k]) for k, v in plain.items()):
            wrong.append(f"{name}: the evaluation path draws at random")
        for key in data.fields.keys() & batch.keys() & first.keys():
            if isinstance(first[key], Tensor) and first[key].dtype != batch[key].dtype:
                wrong.append(f"{name}: '{key}' is {first[key].dtype}, in the other split {batch[key].dtype}")
    if "train" not in stage.data:
        made = training_samples(context)
        batch = fetch(made, list(range(min(2, len(made)))), None, run.device)
    terms = _loss_schema(run, stage, batch, wrong)
    shapes = ", ".join(f"{k} {tuple(v.shape)} {str(v.dtype)[6:]}" for k, v in batch.items() if isinstance(v, Tensor))
    wrong += (contrary := _contrary(stage.metric))
    drawn = [w for w in wrong if w.endswith("the evaluation path draws at random")]
    return Finding(
        not wrong, "; ".join(wrong) if wrong else shapes, "equal fields, shapes and dtypes in both splits and both paths; "
        "a sample is a function of (seed, epoch, index)",
        "get() must draw from the generator that it receives, not from one of its own, numpy or random\n"
        "get() and collate() of the two splits differ", batch=batch,
        cause="get() draws without a generator: augment only where one is handed to it" if drawn and len(drawn) == len(wrong)
        else "" if contrary else named.explain_infinite_loss(stage.model, batch, terms),
    )  # fmt: skip


def _contrary(metric: Metric) -> list[str]:
    """Return what is wrong with a metric whose perfect score counts as worse than chance: the worst checkpoint is kept as the best one."""
    if not metric.better(metric.floor, metric.ceiling):
        return []
    way = "higher" if metric.higher_is_better else "lower"
    return [f"of '{metric.name}' the {way} value is the better one, but its ceiling (a perfect model) {metric.ceiling:g} is worse than its floor "
            f"(chance) {metric.floor:g}: set higher_is_better={not metric.higher_is_better} in its core.Metric, or exchange the two"]  # fmt: skip


def _of_any_length(data: Data, key: str, drawn: Tensor, plain: Tensor, run: Run) -> bool:
    """Return whether two batches of a field differ only in axes in which single samples differ, too: an augmentation may change the speed of
    a recording, or leave out words of a text."""
    if drawn.ndim != plain.ndim:
        return False
    shapes = [tuple(fetch(data, [i], None, run.device)[key].shape) for i in pick(data, LENGTHS, run.cfg.run.seed)]
    return all(a == b or len({s[axis] for s in shapes}) > 1
               for axis, (a, b) in enumerate(zip(drawn.shape, plain.shape, strict=True)))  # fmt: skip


def _loss_schema(run, stage: Stage, batch: dict, wrong: list[str]) -> dict[str, Tensor]:
    with evaluating(stage.model), evaluating(stage.eval_model), run.autocast():
        terms = stage.loss(stage.model, batch)
        refuse_unnamed(terms)
        metrics = stage.evaluate(stage.eval_model, _few(stage))
        probed = stage.gate_evaluator.evaluate(stage.eval_model, _few(stage)) if stage.probe else metrics
    counts = stage.counts(batch)
    for name, value in terms.items():
        if not isinstance(value, Tensor) or value.ndim:
            wrong.append(f"loss term '{name}' is not a scalar sum: {getattr(value, 'shape', type(value).__name__)}")
        elif not torch.isfinite(value):
            wrong.append(f"loss term '{name}' is {value.item()}")
        if name not in counts and "*" not in counts:
            wrong.append(f"loss term '{name}' has no denominator (counts: {', '.join(counts)})")
    for found, name in ((metrics, stage.metric.name), (probed, stage.gate_evaluator.metric.name)):
        if name not in found:
            wrong.append(f"evaluate() returns {', '.join(found)}, not '{name}'")
    try:
        json.dumps({k: float(v) for k, v in (metrics | probed).items()})
    except (TypeError, ValueError) as error:
        wrong.append(f"evaluate() must return numbers: {error}")
    return terms


def _few(stage: Stage) -> View:
    return View(stage.data["val"], range(min(stage.expect.at_most(16), len(stage.data["val"]))))


@gate(
    "data", rows="C7 V1", title="fields, ranges and labels match the recipe's declaration", reads="data", lasting=False
)
def inventory_gate(context: GateContext) -> Finding:
    """Finds invalid labels, missing classes, values out of range or not finite, empty or constant inputs, and a single
    input entry that predicts the target."""
    run, stage = context.look()
    train_set(stage)
    best = context.data_report.get("best_single_input")
    faults = [fault for name in context.scans for fault in _split_faults(context, stage, name)]
    if best and 1 - best["accuracy"] < 0.1 * (1 - best["majority"]):  # a tenth of the majority class's errors
        faults.append((f"entry {best['entry']} of the input alone predicts the target with an accuracy of {best['accuracy']:.0%}",
                       f"the target was written into the input: entry {best['entry']} alone gives it"))  # fmt: skip
    faults += [*_splits_differ(context.scans, stage), *_paths_differ(run, stage, context.cfg.run.seed)]
    faults += [*_belongs_elsewhere(stage), *_blurred(stage), *characters.faults(context.scans)]
    if pair := context.data_report.get("exchanged_classes"):
        faults.append((turned.Exchanged(**pair).words(), turned.Exchanged(**pair).cause()))
    against = neighbours.Contradicted(**k) if (k := context.data_report.get("contradicted_labels")) else None
    faults += neighbours.faults(context.data_report)
    if change := context.data_report.get("foreign_change"):
        faults.append((turned.Foreign(**change).words(), turned.Foreign(**change).cause()))
    faults += [(named, "class ids built for each split: build one list of classes, use it in all")
               for named in paths.differently_named(stage)]  # fmt: skip
    wrong = [fault for fault, _ in faults]
    counts = ", ".join(f"{s.total:,} {n}" for n, s in context.scans.items())
    classes = next(
        (f["per_class"] for s in context.scans.values() for f in s.fields.values() if "per_class" in f), None
    )
    spread = f", per class {classes['min']}-{classes['max']}" if classes else ""
    spread += f"; {against.words()}" if against and against.scattered else ""
    return Finding(
        not wrong, "; ".join(wrong) if wrong else counts + spread,
        "valid labels, every class in both splits, one label per input, finite values in range, inputs that vary, "
        "no input entry that is the target",
        "the loader scales, casts or decodes wrongly (read data.json)\nlabels start at 1, or a class folder is missing\n"
        "one input is in two class folders\nthe target is written into the input\nthe training path scales, normalises or labels "
        "differently from the evaluation path, or orders channels differently (RGB, BGR)\n"
        "class ids are built for each split: build one list of classes, and use it in all",
        evidence={"best_single_input": best, "contradictory": {n: s.contradictory for n, s in context.scans.items()}},
        cause=next((cause for _, cause in faults if cause), ""),
    )  # fmt: skip


def _belongs_elsewhere(stage: Stage) -> Iterator[tuple[str, str]]:
    """Yield (fault, cause) of targets that belong to the inputs of neighbouring rows."""
    if stage.expect.gate_batch_size and not isinstance(next(iter(stage.data["train"].get(0, None).values())), str):
        return  # a picture takes a large part of a second
    for name, data in stage.data.items():
        if name != "test" and (found := pairing.moved(data)) is not None:
            cause = f"a column of targets moved by {abs(found.lag)} against its inputs: a cell or a file was deleted or inserted"
            yield f"{name}: {found.words()}", cause


def _blurred(stage: Stage) -> Iterator[tuple[str, str]]:
    """Yield (fault, cause) of training pictures without the fine detail of the held-out ones."""
    if "val" not in stage.data or stage.expect.gate_batch_size:
        return  # a picture takes a large part of a second
    if (found := detail.missing(stage.data["train"], stage.data["val"])) is not None:
        yield found.words(), detail.CAUSE


def _split_faults(context: GateContext, stage: Stage, name: str) -> Iterator[tuple[str, str]]:
    """Yield (fault, the cause that its numbers name) of the fields of a split, and of its samples."""
    scan, fields = context.scans[name], stage.data[name].fields
    unused = {
        n: {k: _unused(stage.data[n].fields[k], f) for k, f in s.fields.items()} for n, s in context.scans.items()
    }
    for key, found in scan.fields.items():
        others = [set(u[key]) for n, u in unused.items() if n != name and key in u]
        for fault, cause in _field_faults(key, fields[key], found, unused[name][key], others):
            yield f"{name}: {fault}", cause
    if contents.refused(torn := scan.contradictory):
        a, b = torn["pairs"][0]
        yield (f"{name}: {torn['samples']:,} of {torn['of']:,} samples have an input that also occurs with another "
               f"'{torn['field']}', for example samples {a} and {b} (allowed: {contents.CONTRADICTORY:.0%})",
               f"one input in two class folders: {torn['samples']:,} samples of {torn['of']:,}")  # fmt: skip
    elif torn := context.data_report["splits"][name].get("torn_copies"):
        a, b = torn["pairs"][0]
        yield (f"{name}: {torn['samples']:,} of {torn['of']:,} compared samples have a copy, saved again, with another class, for "
               f"example samples {a} and {b} (allowed: {contents.CONTRADICTORY:.0%})",
               f"one picture in two class folders, saved again: {torn['samples']:,} of {torn['of']:,} compared samples")  # fmt: skip
    for key, column in scan.texts.items():
        if key in fields and fields[key].role == "target" and (cut := texts.cut_at(column)):
            yield (f"{name}: {cut[1]:,} of {len(column):,} texts of '{key}' end at {cut[0]:,} characters, the longest of all",
                   f"'{key}' was cut at {cut[0]:,} characters before it was stored: answers without their ends")  # fmt: skip
    constant = context.data_report["splits"][name]["constant_input_share"]
    if constant is not None and constant > 0.98:
        yield (f"{name}: {constant:.0%} of the input entries are the same in every sample",
               f"the loader returns the same input for all {scan.total:,} samples: blank, or overwritten after reading")  # fmt: skip


def _field_faults(
    key: str, spec: Field, found: dict, unused: list[str], others: list[set[str]]
) -> Iterator[tuple[str, str]]:
    """Yield (fault, cause) of one field. `unused`: its classes without a sample; `others`: those in the other splits."""
    if found["non_finite_samples"]:
        yield (f"{found['non_finite_samples']} sample(s) with NaN or infinite '{key}'",
               f"'{key}' has NaN or infinite values as it is read: a division by 0, a logarithm of 0, or damaged files")  # fmt: skip
    beyond = []
    if spec.low is not None and found.get("min", spec.low) < spec.low:
        beyond.append(f"the lowest '{key}' is {found['min']:g}, below {spec.low:g}")
    if spec.high is not None and found.get("max", spec.high) > spec.high:
        beyond.append(f"the highest '{key}' is {found['max']:g}, above {spec.high:g}")
    if spec.low is not None and spec.high is not None and "max" in found:
        used = (found["max"] - found["min"]) / (spec.high - spec.low)
        if used < 0.1 and spec.role in ("input", "source"):
            beyond.append(f"'{key}' uses {used:.1%} of its declared range {spec.low:g} to {spec.high:g}")
    for fault in beyond:
        yield fault, "" if spec.classes else named.explain_range(spec, found)
    if found.get("invalid"):
        yield (
            f"'{key}' has values that are not class ids: {found['invalid']}",
            named.explain_labels(spec, found, others),
        )
    if unused:
        yield (f"no sample of class {', '.join(unused[:5])}{' ...' if len(unused) > 5 else ''}",
               named.explain_labels(spec, found, others))  # fmt: skip


def _unused(spec: Field, found: dict) -> list[str]:
    """Return the classes without a sample."""
    return [c for c, n in found.get("classes", {}).items() if n == 0] if spec.classes else []


def _splits_differ(scans: dict[str, inventory.Scan], stage: Stage) -> list[tuple[str, str]]:
    """Compare the inputs of the splits: pictures on one scale, means within one standard deviation, spreads within a factor of three (ten times
    that, of fewer than `ENOUGH` different samples, whose mean may be any). Return faults, each with the cause that its numbers name."""
    wrong = []
    if not {"train", "val"} <= scans.keys():
        return wrong
    k = 1 if min(len(set(scans[name].hashes)) or ENOUGH for name in ("train", "val")) >= ENOUGH else 10
    for key, t in scans["train"].fields.items():
        v = scans["val"].fields[key]
        if t["role"] != "input" or "mean" not in t or "mean" not in v or len(t["mean"]) != len(v["mean"]):
            continue
        other = rescaled(t, v)
        for mt, st, mv, sv in zip(t["mean"], t["std"], v["mean"], v["std"], strict=True):
            if other or (st > 0 and (abs(mt - mv) > k * st or not st / (3 * k) <= sv <= 3 * k * st)):
                fault = f"'{key}' has another scale in val: mean {mv:.3g}, std {sv:.3g}; in train mean {mt:.3g}, std {st:.3g}"
                wrong.append((fault, named.explain_split_scales(t, v, stage.data["train"].fields[key])))
                break
    return wrong


def _paths_differ(run: Run, stage: Stage, seed: int) -> list[tuple[str, str]]:
    """Compare 256 samples on the training path and on the evaluation path: equal classes, inputs on the same scale. Return faults,
    each with the cause that its numbers name. At most as many samples as in a micro-batch are in memory."""
    data = stage.data["train"]
    indices = pick(data, min(256, len(data)), seed)
    changed, redrawn = Counter[str](), Counter[str]()  # labels: between the paths, between two draws of the first
    inputs: dict[str, tuple[paths.Moments, paths.Moments]] = {}
    for part in split_evenly(indices, own_size(run)):
        drawn, plain = fetch(data, part, seed, run.device), fetch(data, part, None, run.device)
        for key, spec in data.fields.items():
            a, b = drawn[key], plain[key]
            # An augmentation may move or flip targets that have a class for each position
            if spec.role == "target" and spec.classes and a.ndim == 1:
                changed[key] += int((a != b).sum())
                redrawn[key] += int((a != fetch(data, part, seed + 1, run.device)[key]).sum()) if changed[key] else 0
            if spec.role == "input" and isinstance(a, Tensor) and a.is_floating_point():
                for moments, x in zip(inputs.setdefault(key, (paths.Moments(), paths.Moments())), (a, b), strict=True):
                    moments.add(x)
    # Beside labels that stay, one that every draw makes anew is a task of its own (which way was the picture turned?); noise changes few
    wrong = [(f"the training path changes '{key}' of {n} in {len(indices)} samples", "the training path gives other labels than the evaluation path")
             for key, n in changed.items() if n and not (0 in changed.values() and 2 * min(n, redrawn[key]) > len(indices))]  # fmt: skip
    for key, (a, b) in ((key, both) for key, both in inputs.items() if both[1].std > 0):
        if order := paths.exchanged_channels(a.channel_means, b.channel_means):
            detail = " ".join(map(str, order))
            fault = f"'{key}': the channels of the evaluation path are those of the training path in the order {detail}"
            cause = f"the evaluation path has its channels in another order ({detail}): RGB read as BGR, or the reverse"
            wrong.append((fault, cause))
        if abs(a.mean - b.mean) > 0.5 * b.std or not 0.5 <= a.std / b.std <= 2:
            fault = (f"'{key}' has another scale in training: mean {a.mean:.3g}, std {a.std:.3g}; "
                     f"in evaluation mean {b.mean:.3g}, std {b.std:.3g}")  # fmt: skip
            wrong.append((fault, named.explain_path_scales(a.mean, a.std, b.mean, b.std, data.fields[key])))
    return wrong
