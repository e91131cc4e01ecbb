"""Checks of losses and targets, and the facts of a run that `interventions` compares."""

from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from trainworthy.core.base.verdict import Fault
from trainworthy.core.data.alike import nearest
from trainworthy.guard.checks import causality, objectives
from trainworthy.guard.checks.behaviour import lagging
from trainworthy.guard.checks.invariants import names, tops
from trainworthy.guard.checks.results import finding, skip
from trainworthy.guard.measures.data import indexing, interpolated, one_sample, token_streams
from trainworthy.guard.measures.data.class_numbers import CAUSE, numbering
from trainworthy.guard.measures.losses import mixing, pairing, supervision
from trainworthy.guard.measures.losses.float_targets import binary_right, output_target_correlation, r_squared
from trainworthy.guard.measures.losses.targets import constant_losses, floored
from trainworthy.guard.measures.scores import denominators
from trainworthy.guard.observing.observer import Observer

SETTLED = 8  # losses just before an evaluation: after five steps at a high rate, answers may be wrong in one way
SHIFTS = {
    0: (
        "every target is the token that the model sees at the same position",
        "the shift by one is missing, or the mask is inverted: the model copies its input",
    ),
    2: ("targets run two tokens ahead of the input", "labels are shifted before the loss and again inside it"),
    3: ("targets run three tokens ahead of the input", "labels are shifted several times"),
    -1: ("every target is the token before", "the shift has the wrong direction"),
    99: (
        "the last token of each row is trained on the first of the next row",
        "the batch is flattened before the shift",
    ),
}


def targets(seen: Observer) -> dict:
    """Find class targets that are constant, ignored or shifted, batches of one class, and predictions paired with every
    target."""
    found = seen.evidence.outer.fault() or seen.evidence.multi_hot.fault() or seen.evidence.padded_rows.repeated()
    found = found or objectives.exchanged(seen) or objectives.copied(seen) or objectives.mixed(seen)
    found = found or token_streams.fault(seen.evidence.texts) or objectives.read_apart(seen)
    found = found or causality.packed_copy(seen) or shifted(seen.written, seen)
    if fault := found or pairing.check(seen.pairing) or indexing.check(seen.indexed):
        return finding("targets", *fault)
    rows = [r for r in seen.calls if r.get("n")]
    if not rows and seen.labels and seen.labels[0]["distinct"] + seen.labels[-1]["distinct"]:
        return labels(seen.labels)
    if not rows and len(seen.labels) >= 4 and not any(r["scored"] for r in seen.labels):
        return labels(seen.labels)
    marked = [r for r in seen.calls if r.get("symbols")]
    if len(marked) >= 3 and sum(r["blank"] > 0 for r in marked) > 0.5 * len(marked):
        return finding(
            "targets",
            f"{sum(r['blank'] for r in marked):,} of {sum(r['symbols'] for r in marked):,} targets of ctc_loss are its blank",
            "a symbol has the index of the blank, and can never be written: number the symbols from 1, or set blank=",
        )
    if fault := supervision.contradiction(seen.soft):
        return finding("targets", *fault)
    if not rows:
        return binary_targets([r for r in seen.calls if "low" in r], own=seen.fits.own)
    found = one_sample.fault(seen.points) or supervision.class_weights(rows)
    found = found or supervision.masked_elsewhere(rows) or supervision.unmasked_scored(rows)
    found = found or supervision.one_of_two(rows) or supervision.padding_scored(rows) or supervision.padded_apart(rows)
    found = found or lost(rows, "calls of the loss") or shifted(rows, seen) or one_class(rows)
    if fault := found or positive_first(rows) or ignored_token(rows) or interpolated.fault(rows):
        return finding("targets", *fault)
    distinct = set().union(*(r["distinct"] for r in rows))
    sizes = [r["scored"] for r in rows]
    least = max(1, 0.25 * len(distinct)) if len(distinct) < 40 else 1
    alone = sum(len(r["distinct"]) <= least for r in rows)
    sorted_by = alone > 0.5 * len(rows) and len(rows) >= 6 and majority(rows) < 0.5  # blocks end within batches
    if len(distinct) >= 4 and sorted(sizes)[len(sizes) // 2] >= 8 and sorted_by:
        return finding(
            "targets",
            f"{alone} of {len(rows)} batches hold at most {int(least)} of {len(distinct)} classes",
            "the data are sorted by class and not shuffled (shuffle=True)",
        )
    classes = max(r["classes"] for r in rows)
    some = "at least " * any(len(r["distinct"]) >= 50 for r in rows)  # of a call's classes 50 are kept
    return finding("targets", f"{scored(rows)} targets scored, {some}{len(distinct)} of {classes} classes seen")


def ignored_token(rows: list[dict]) -> Fault | None:
    """Find a token that the loss ignores although it occurs between others."""
    inside = [r["inside"] for r in rows if "inside" in r]
    count, at, of = (sum(some[i] for some in inside) for i in range(3))
    if count < 32 or at < 0.1 * of:
        return None
    return (
        f"token {next(r['ignored'] for r in rows if 'inside' in r)} is ignored by the loss, and occurs {count:,} times between other tokens",
        "ignore_index is the id of a real token, which is never scored: padding needs an id of its own, or -100",
    )


def binary_targets(rows: list[dict], *, own: bool) -> dict:
    """Judge the targets of binary losses; `own`: they are the model's input."""
    if not rows:
        return skip("targets", "no loss with class targets was seen")
    low, high = min(r["low"] for r in rows), max(r["high"] for r in rows)
    if low < 0 or high > 1:
        return finding(
            "targets", f"binary targets range from {low:g} to {high:g}", "targets of binary losses are in 0..1"
        )
    numbered = None if own else supervision.numbered_masks(rows)
    if fault := supervision.tiny_targets(rows) or supervision.shared_target(rows) or numbered:
        return finding("targets", *fault)
    if fault := supervision.upside_down([r for r in rows if "pos_weight" in r]):
        return finding("targets", *fault)
    return finding("targets", f"binary targets from {low:g} to {high:g}")


def labels(rows: list[dict]) -> dict:
    """Check the labels that a model got as an argument."""
    if fault := lost(rows, "batches") or shifted(rows) or one_class(rows):
        return finding("targets", *fault)
    return finding("targets", f"{scored(rows)} labels scored by the model's own loss")


def scored(rows: list[dict]) -> str:
    """Return how many targets are not ignored, as text."""
    return f"{sum(r['scored'] for r in rows):,} of {sum(r['n'] for r in rows):,}"


def lost(rows: list[dict], of: str) -> Fault | None:
    """Find calls or batches in which every target is ignored."""
    empty = sum(r["scored"] == 0 for r in rows)
    if empty <= 0.3 * len(rows):
        return None
    return f"in {empty} of {len(rows)} {of} every target is ignored", "truncation or masking removes all labels"


def shifted(rows: list[dict], seen: Observer | None = None) -> Fault | None:
    """Find targets that are the model's input tokens, but not the next ones."""
    found = Counter(tuple(s) for r in rows if (s := r.get("shift")) is not None)
    shift, times = found.most_common(1)[0] if found else ((), 0)
    if len(shift) != 1 or times <= 0.8 * sum(found.values()):  # several shifts fit a text that repeats itself
        return None
    if shift[0] == 0 and seen is not None:
        with torch.random.fork_rng(devices=[]):
            if causality.sees_the_same_place(seen) is False:  # a decoder that is given its targets, and shifts them
                return None
    return SHIFTS.get(shift[0])


def one_class(rows: list[dict]) -> Fault | None:
    """Find targets that are all the same, unless a contrastive loss has put the positive into one column of its own scores."""
    distinct = set().union(*(r["distinct"] for r in rows))
    count = sum(r["scored"] for r in rows)
    if len(rows) >= 4 and len(distinct) == 1 and count >= 64 and all(r.get("pairs") for r in rows):
        return (
            f"all {count:,} targets are {next(iter(distinct))}, and the scores are the products of each sample with all others of its batch",
            "the positive of row i is in column i: use labels = torch.arange(len(scores)), not torch.zeros()",
        )
    if len(distinct) != 1 or count < 64 or len(rows) < 4 or not all(r.get("layer", True) for r in rows):
        return None
    return (
        f"all {count:,} targets are {next(iter(distinct))}",
        "labels are lost between the data and the loss (a folder is read wrongly, an index is on the wrong axis), or a single token is scored",
    )


def positive_first(rows: list[dict]) -> Fault | None:
    """Find targets that count the rows of a batch, while the first column has high scores in the first calls. In scores of a batch
    with itself the positive of row i is in column i; where negatives come from a queue, all positives are in column 0."""
    first = [r.get("first", 0.0) for r in rows[:3]]
    if len(rows) < 4 or min(first) < 0.6 or not all("first" in r for r in rows[:8]):
        return None
    return (
        f"the targets of every batch are 0, 1, 2, ..., and the score of column 0 is among the highest tenth in {min(first):.0%} of the rows",
        "the positive is in column 0 of these scores: use labels = torch.zeros(len(scores)), not torch.arange()",
    )


def loss_input(seen: Observer) -> dict:
    """Find probabilities as input of a loss that needs logits or log-probabilities, and regression targets out of the output's range."""
    inputs = seen.evidence
    fault = inputs.output_ranges.fault() or (inputs.log_scales.first and inputs.log_scales.fault(names(tops())))
    fault = fault or supervision.turned(inputs.turned, seen.calls) or inputs.logits.fault()
    fault = fault or inputs.overlaps.fault() or inputs.moved_classes.fault() or floored(seen.calls)
    if fault:
        return finding("loss-input", *fault)
    if not seen.calls:
        return skip("loss-input", "none of the losses that can be fed wrongly is used")
    for name in sorted({r["loss"] for r in seen.calls}):
        rows = [r for r in seen.calls if r["loss"] == name and r["prob"] is not None]
        if len(rows) >= 3 and all(r["prob"] for r in rows):
            wants = "logarithms of probabilities" if name in ("nll_loss", "kl_div") else "logits"
            cause = "sigmoid" if "binary" in name else "softmax"
            fix = "log_softmax is meant" if name in ("nll_loss", "kl_div") else f"remove the {cause} before the loss"
            return finding(
                "loss-input",
                f"{name} gets probabilities in all {len(rows)} calls and needs {wants}",
                f"a {cause} before a loss that has its own: {fix}",
            )
        over = [r["over_batch"] for r in seen.calls if r["loss"] == name and "over_batch" in r]
        if len(over) >= 3 and all(over):
            return finding(
                "loss-input",
                f"{name} gets logarithms of probabilities that sum to 1 over the batch, and not over the classes, in all {len(over)} calls",
                "log_softmax(dim=0) where dim=1 is meant",
            )
        raw = [r.get("raw") for r in seen.calls if r["loss"] == name]
        if len(raw) >= 3 and all(raw):
            return finding(
                "loss-input",
                f"{name} gets scores whose exponentials do not sum to 1 in all {len(raw)} calls, and needs logarithms of probabilities",
                "log_softmax over the classes is missing before the loss. The loss falls below zero, and the model learns nothing",
            )
    kinds = Counter(r["loss"] for r in seen.calls)
    return finding("loss-input", ", ".join(f"{k}: {n} calls" for k, n in kinds.items()))


def epochs(seen: Observer) -> float:
    """Count passes over the training data, with the last one as a fraction."""
    train = [p for p in seen.passes if p.training and p.length]
    return sum(p.got / p.length for p in train)


def renamed(seen: Observer) -> Fault | None:
    """Find an evaluation whose classes are numbered otherwise than in training: another numbering, found on one half of its
    samples, is right on the other half far more often, about as often as training is."""
    one = next((p for p in reversed(seen.passes) if p.answers and not p.backwards and p.started >= 8), None)
    if one is None:
        return None
    rows = [r for r in seen.calls if r.get("scored") and one.started - 10 <= r["step"] < one.started]
    if len(rows) < SETTLED:
        return None
    truth, answer = (torch.cat(x) for x in zip(*one.answers, strict=True))
    trained = sum(r["right"] for r in rows) / sum(r["scored"] for r in rows)
    found = numbering(truth, answer) if len(truth) >= 100 else None
    if found is None or found.count < 3:
        return None
    as_it_is, new, moved, count = found.as_it_is, found.right, found.moved, found.count
    if moved < 2 or new - as_it_is < 0.25 or trained - as_it_is < 0.25:
        return None
    weak = moved < 0.5 * count or new < 2.5 * max(as_it_is, 1 / count) or new < 0.8 * trained
    if new < 0.5 and weak:  # a model of few classes that is still bad may confuse two of them in one way
        return None
    return (
        f"{as_it_is:.2f} right in the evaluation and {trained:.2f} in training; with {moved} of {count} classes "
        f"numbered differently {new:.2f} of {found.samples} other samples of the evaluation",
        CAUSE,
    )


def learning(seen: Observer) -> dict:
    """After a whole pass: check that the evaluation is about as good as training was on samples seen for the first time."""
    rows = [r for r in seen.calls if r.get("scored") and r["loss"] in ("cross_entropy", "nll_loss")]
    first = next((p for p in seen.passes if p.training), None)
    if first is None or not rows or max(r["classes"] for r in rows) > 1000:
        return skip("learning", "no classification over a loader")
    if fault := renamed(seen):
        return finding("learning", *fault)
    size = first.length or 0
    late = [r for r in rows if first.started + 0.7 * first.steps <= r["step"] < first.started + first.steps]
    if not late or first.got < 0.95 * size or first.steps < 15:
        of = f" of {size}" if size else ""
        return skip("learning", f"{first.got}{of} batches of the first epoch seen: too early to say")
    n = sum(r["scored"] for r in late)
    right = sum(r["right"] for r in late) / n
    total = Counter(t for r in rows for t in r["distinct"])
    if len(total) < 2:
        return skip("learning", "one class")
    evals = [p for p in seen.passes if p.seen and not p.backwards and p.started >= first.started + first.steps]
    if evals:
        seen_n = evals[0].seen
        got = max(evals[0].right, evals[0].right_batch) / seen_n
        error = (right * (1 - right) * (1 / n + 1 / seen_n)) ** 0.5
        text = f"{right:.2f} of the last {n} training samples right when first seen, then {got:.2f} of {seen_n} in the evaluation"
        if right - got > max(0.25, 6 * error) and got < 0.6 * right and not lagging(seen):
            return finding("learning", text, "the evaluation's labels, classes or transforms differ from training's")
        return finding("learning", text)
    return finding("learning", f"{right:.2f} of the last {n} training samples right when first seen")


def of(seen: Observer) -> dict[str, Any]:
    """Return plain facts of one run."""
    rows = [r for r in seen.calls if r.get("scored")]
    curve = mixing.pooled(rows)
    evals = [p for p in seen.passes if p.seen and not p.backwards]
    evals_after = [p for p in evals if p.started >= max(8, 0.5 * seen.steps)]
    first = next((p for p in seen.passes if p.training), None)
    fit = {} if rows else seen.fits.facts()
    place = fit.get("target") if fit else max(seen.places, key=seen.places.get) if seen.places else None
    later = [p for p in seen.passes if p.pairs and not p.backwards and p.started >= max(8, 0.5 * seen.steps)]
    return {
        "loss_calls": len(rows),
        "classes": max((r["classes"] for r in rows), default=0),
        "optimizers": sum(g.steps > 0 for g in seen.groups.values()),
        # every optimiser steps after every backward()
        "successive": successive([g.span for g in seen.groups.values() if g.steps]),
        "one_loss": {g.steps for g in seen.groups.values()} <= {0, seen.backwards},
        "train_accuracy": [r["right"] / r["scored"] for r in curve],
        "nll": [r["nll"] for r in curve],
        "constant": constant_losses(curve),
        "eval_right": [p.right for p in evals_after],
        "eval_right_batch": [p.right_batch for p in evals_after],
        "eval_seen": [p.seen for p in evals_after],
        "before_eval": [before(curve, p.started) for p in evals_after],
        "majority": majority(rows),
        "steps": seen.steps,
        "epochs": epochs(seen),
        "batches": first.length if first else None,
        "loader": first is not None or seen.batch_calls > 0,
        "target": place,
        "inputs": fit.get("inputs"),
        "fit": fit,
        "unit": seen.fits.unit,
        "direct": seen.fits.direct / max(1, seen.fits.calls),
        "closed": bool(getattr(seen.control, "closed", "")),
        "average": lagging(seen),
        "one_source": len(getattr(seen.control, "kept", ())) == 1,
        "eval_r2": [r_squared(p.pairs) for p in later],
        "eval_correlation": [c for p in later if (c := output_target_correlation(p.pairs))],
        "eval_binary": [binary_right(p.pairs) for p in later],
        "changed": getattr(seen.control, "changed", 0),
        "unfit": getattr(seen.control, "unfit", ""),
        "token_shift": any(r.get("shift") for r in (*rows, *seen.labels)),
        "forced": any(r.get("forced") for r in rows),
        "trend": trend(seen.losses),
        "neighbours": neighbours(seen.points),
        "output_span": getattr(seen.control, "output_span", []),
        "counted": [(denominators.counted(p), span) for p, span in getattr(seen.control, "scored", [])],
        "mixed": two_targets(rows),
        "contrasted": bool(rows) and all(r.get("made") and not r.get("layer", False) for r in rows),
    }


def successive(spans: list[tuple[int, int]]) -> bool:
    """Return whether each optimiser made its first step after the last one of those before it: folds, or stages."""
    return all(b[0] > a[1] for a, b in pairwise(sorted(spans)))


def two_targets(rows: list[dict]) -> bool:
    """Return whether the same outputs get two targets at most steps (mixup)."""
    homes: dict[tuple, set] = {}
    for r in rows:
        if "scores" in r:
            homes.setdefault((r["step"], r["scores"]), set()).add(r["home"])
    return sum(len(h) > 1 for h in homes.values()) > 0.5 * max(1, len(homes))


def neighbours(points: list) -> list[float]:
    """Return how often the nearest other input of the first pass has the same class, the count, and chance."""
    points = [(x, y) for x, y in points if x.shape[1:] == points[0][0].shape[1:]][:24]
    n = sum(len(y) for _, y in points)
    if n < 128:
        return []
    x, y = torch.cat([x for x, _ in points])[:1024], torch.cat([y for _, y in points])[:1024]
    chance = float((y.unique(return_counts=True)[1] / len(y)).max())
    return [float((y[nearest(-torch.cdist(x, x), own=True)] == y).float().mean()), len(y), chance]


def before(rows: list[dict], step: int) -> list[float]:
    """Accuracy and loss of the five training steps before an evaluation."""
    last = [r for r in rows if step - 5 <= r["step"] < step]
    if not last:
        return []
    return [sum(r["right"] for r in last) / sum(r["scored"] for r in last), sum(r["nll"] for r in last) / len(last)]


def majority(rows: list[dict]) -> float:
    """Return the fraction of the most frequent class among the targets; 1 if there are too many classes to count."""
    counted = [r["counts"] for r in rows if r.get("counts")]
    if not counted or len({len(c) for c in counted}) > 1:
        return 1.0
    total = np.sum(counted, axis=0)
    return float(total.max() / max(1, total.sum()))


def trend(losses: list[float]) -> list[float]:
    """Return the mean loss of the first and of the last eighth."""
    if len(losses) < 8:
        return []
    k = max(2, len(losses) // 8)
    return [float(np.mean(losses[:k])), float(np.mean(losses[-k:]))]
