"""Gates on images: scale of the net's input (V1), class balance (V6), and a monitor of classes that are never predicted (V6). For
semantic segmentation: ids in masks (V5); scored.py has the pixels that loss and metric score, joint_transforms.py one transform for both.

The gates of segmentation need data of type masks.Windows, samples with `image` and `mask`, and logits (B, n, H, W).
"""

from collections import Counter

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from trainworthy.core.base.doubles import to_double
from trainworthy.core.base.modes import hooked
from trainworthy.core.base.verdict import Finding
from trainworthy.core.gates import gate
from trainworthy.core.gates.gate import GateContext, fetch, pick
from trainworthy.core.loop.run import evaluating
from trainworthy.core.monitoring.monitors import Monitor, monitor
from trainworthy.core.recipe.stage import Data
from trainworthy.recipes.vision.data.masks import IGNORE
from trainworthy.recipes.vision.gates import objective, stored_masks
from trainworthy.recipes.vision.gates.joint_transforms import joint_transforms, outputs
from trainworthy.recipes.vision.gates.scored import scored, whole

SAMPLES = 16
# Limits of the first layer's input: standard deviation of a channel, distance of its mean from 0.
SPREAD, OFF = (0.2, 4.0), 2.5
EVEN = 1.2  # largest ratio between the shares of two classes in the loss


# ---------------------------------------------------------------------------------------------------------------- classes
@gate("balance", rows="V6", title="classes have equal weight if balancing is set", reads="data model loss counts")
def balance(context: GateContext) -> Finding:
    """Multiplies the number of samples of a class in an epoch by the weight of one sample in the loss. Classes must have equal products,
    and the loss must be divided by the same weight."""
    (run, stage), smoothing = context.look(), context.cfg.label_smoothing
    data = stage.data["train"]
    first, often = {}, Counter()
    for i in range(len(data)):
        label = int(data.peek(i, "label"))
        first.setdefault(label, i)
        often[label] += 1
    say, weights, names, wrong = {}, {}, data.fields["label"].classes, []
    for label, i in sorted(first.items()):
        one = fetch(data, [i], None, run.device)
        with evaluating(stage.model), torch.no_grad(), run.autocast():
            plain = F.cross_entropy(stage.model(one["image"]).float(), one["label"], label_smoothing=smoothing)
            weighs = float(sum(stage.loss(stage.model, one).values()) / plain)
        divided = float(sum(stage.counts(one).values()))
        say[names[label]], weights[label] = often[label] * weighs, weighs
        if abs(weighs - divided) > 0.01 * weighs:
            wrong.append(f"a sample of {names[label]} weighs {weighs:.3g} and is divided by {divided:.3g}")
    most, least = max(say, key=say.get), min(say, key=say.get)
    ratio, total = say[most] / max(say[least], 1e-9), sum(say.values())
    measured = (
        f"{most} has {say[most] / total:.1%} of the loss of an epoch, {least} {say[least] / total:.1%}; samples "
        f"{min(often.values()):,} to {max(often.values()):,} a class"
    )
    return Finding(
        ratio <= EVEN and not wrong,
        "; ".join([measured, *wrong[:1]]),
        f"no class more than {EVEN:g} times another; the same weight in loss and denominator",
        "the weights are those of another split, or the sampler repeats samples of the wrong classes",
        cause=_unbalanced([often[k] for k in weights], [*weights.values()]) if ratio > EVEN else
        "the weights are in the loss but not in its denominator (counts)" if wrong else "",
        evidence={"say": say, "often": {names[k]: v for k, v in often.items()}},
    )  # fmt: skip


def _unbalanced(often: list[int], weights: list[float]) -> str:
    """Return why the products of these are unequal: samples of each class in an epoch, and what one weighs in the loss."""

    def even(values: list[float]) -> bool:
        return max(values) <= EVEN * min(values)

    if even(often) and not even(weights):
        return "sampler and weights are both on: each class is drawn as often as the others, and the loss has weights, too; leave one out"
    if even(weights):
        return "all samples weigh the same although the classes are drawn unequally: the weights, or the sampler's labels, are of another split"
    inverted = even([w / k for w, k in zip(weights, often, strict=True)])
    moved = even([w * k for w, k in zip(sorted(weights), sorted(often, reverse=True), strict=True)])
    found = ["inverted: they grow with the number of samples of a class"] * inverted + [
        "in another class order than the labels"
    ] * moved
    return f"the weights are {', or '.join(found)}" if found else ""


# ----------------------------------------------------------------------------------------------------------------- labels
@gate("labels", rows="V5", title="masks hold the stored class ids or void", reads="data model", explains=True)
def labels(context: GateContext) -> Finding:
    """Checks the values of masks on both paths. Over whole pictures it also compares the pixels of each class on the evaluation path
    with the stored masks: none lost, none counted twice, no id shifted. Stored masks must fit their own picture (stored_masks)."""
    (run, stage), n, seed = context.look(), outputs(context), context.cfg.run.seed
    wrong, measured, batch, void = [], [], None, ""
    for name, data in stage.data.items():
        indices = pick(data, min(SAMPLES, len(data)), seed)
        for path, draws in (("training", seed), ("evaluation", None)):
            batch = fetch(data, indices, draws, run.device)
            mask = batch["mask"]
            odd = {v: int((mask == v).sum()) for v in mask.unique().tolist() if v != IGNORE and not 0 <= v < n}
            if odd:
                listed = ", ".join(f"{v} ({k:,} pixels)" for v, k in list(odd.items())[:5])
                one_off = " (ids count from 1)" if set(odd) == {n} and not (mask == 0).any() else ""
                wrong.append(f"{name}, {path} path: ids that are not class ids: {listed}{one_off}")
            if mask.dtype != torch.int64:
                wrong.append(f"{name}, {path} path: masks are {mask.dtype}, the loss needs int64")
            if (mask == IGNORE).all():
                wrong.append(f"{name}, {path} path: all pixels of {len(mask)} masks are void")
        read, stored = _pixels(data, n)
        measured.append(
            f"{name} {int(read.sum()):,} pixels, {' '.join(f'{s:.1%}' for s in (read / read.sum().clamp_min(1)).tolist()[:8])}"
        )
        difference = (read - stored).abs().max() / stored.sum().clamp_min(1)
        if difference > 0.02:
            moved = {1: torch.cat([stored.new_zeros(1), stored[:-1]]), -1: torch.cat([stored[1:], stored.new_zeros(1)])}
            shifted = {k: (read - m).abs().max() / stored.sum() for k, m in moved.items()}
            best = min(shifted, key=shifted.get)
            counts = (
                f"{read.long().tolist()[:8]} pixels of each class are scored, {stored.long().tolist()[:8]} are stored"
            )
            by_one = f": ids are shifted by {best:+d}" if shifted[best] <= 0.02 else ""
            more = ((read - stored) / stored.sum()).tolist()
            gained = [k for k, share in enumerate(more) if share > 0.02]
            if len(gained) == 1 and max(abs(share) for k, share in enumerate(more) if k not in gained) <= 0.02:
                void = f"void ({IGNORE}, padding) is scored as class {gained[0]}: masks are made binary or renumbered with their void"
            wrong.append(f"{name}: {counts}{by_one}")
    stored = [(f"{name}: {fault}", cause) for name, data in stage.data.items() if name != "test"
              for fault, cause in stored_masks.faults(data)]  # fmt: skip
    wrong += [fault for fault, _ in stored]
    return Finding(
        not wrong, "; ".join(wrong or measured), f"0 to {n - 1}, or {IGNORE} for void; each stored pixel read once, as its class",
        "ids start at 1, or 0 means void: shift them once, where masks are loaded\n"
        "masks are resized by interpolation, which makes new ids: use nearest neighbour\n"
        "the masks have another number of classes than the net, or number instances", batch=batch if wrong else None,
        cause="\n".join(dict.fromkeys(cause for _, cause in stored)) or void,
    )  # fmt: skip


def _pixels(data: Data, n: int) -> tuple[Tensor, Tensor]:
    """Return the pixels of each class, (n,), on the evaluation path and in the stored masks, over some whole pictures. Both are in stored
    pixels, also if pictures are resized."""
    chosen = whole(data)
    count = lambda mask: to_double(mask.flatten().long().bincount(minlength=256)[:n])  # noqa: E731
    read = {row: torch.zeros(n, dtype=torch.float64) for row in chosen}
    for i, place in enumerate(data.places):
        if place[0] in read:
            read[place[0]] += count(data.get(i, None)["mask"])
    stored = {row: data.pairs[row][1] for row in chosen}
    area = {row: (stored[row].numel() / (data.sizes[row][0] * data.sizes[row][1])) for row in chosen}
    return sum(read[r] * area[r] for r in chosen), sum(count(m) for m in stored.values())


# ------------------------------------------------------------------------------------------------------------------ scale
@gate("scale", rows="V1", title="the first layer's input is normalised exactly once, on both paths", reads="data model")
def scale(context: GateContext) -> Finding:
    """Measures mean and standard deviation of each channel at the input of the first layer with weights, or of the whole input where that
    layer has no channels of the pictures: a perceptron's flat input, patches."""
    (run, stage), seed = context.look(), context.cfg.run.seed
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for path, name, draws in (("training", "train", seed), ("evaluation", "val", None)):
        data = stage.data[name]
        images = fetch(data, pick(data, min(SAMPLES, len(data)), seed), draws, run.device)["image"]
        reached = to_double(_first_input(stage.model, images).cpu())
        flat = (
            reached.transpose(0, 1).flatten(1) if reached.shape[1] == images.shape[1] else reached.reshape(1, -1)
        )  # (C, B x H x W)
        found[path] = flat.mean(1), flat.std(1)
    wrong = [
        f"{path} path: {what} {' '.join(f'{v:.3g}' for v in values.tolist())}"
        for path, (mean, std) in found.items()
        for what, values, bad in (("mean", mean, mean.abs() > OFF), ("std", std, (std < SPREAD[0]) | (std > SPREAD[1])))
        if bad.any()
    ]
    measured = "; ".join(f"{p}: mean {' '.join(f'{v:.2f}' for v in m.tolist())}, std {' '.join(f'{v:.2f}' for v in s.tolist())}"
                      for p, (m, s) in found.items())  # fmt: skip
    return Finding(
        not wrong, "; ".join(wrong) or measured, f"means within {OFF:g} of 0, standard deviations from {SPREAD[0]:g} to {SPREAD[1]:g}",
        "normalised twice: by the data and by the model\nmean and std belong to other weights or other pictures",
        cause="pictures of 0-255 instead of 0-1" if max(s.max() for _, s in found.values()) > 20 else
        "divided by 255 twice, or by 255 before mean and std of 0-255" if max(s.max() for _, s in found.values()) < 0.05 else "",
    )  # fmt: skip


def _first_input(model: nn.Module, images: Tensor) -> Tensor:
    """Return the input of the first module that has weights and gets a tensor (Swin's table of positions gets none)."""
    kept: list[Tensor] = []

    def keep(_module: nn.Module, args: tuple, kwargs: dict) -> None:
        kept.extend(x.detach() for x in [*args, *kwargs.values()][:1] if isinstance(x, Tensor))

    leaves = [m for m in model.modules() if any(True for _ in m.parameters(recurse=False)) and not list(m.children())]
    with (
        hooked(m.register_forward_pre_hook(keep, with_kwargs=True) for m in leaves),
        evaluating(model),
        torch.no_grad(),
    ):
        model(images)
    return kept[0]


SEGMENTING = [labels, scored, joint_transforms, scale, objective.SEGMENT]


# --------------------------------------------------------------------------------------------------------------- monitors
def _every_class(remedy: str) -> Monitor:
    """Return a monitor of each class's recall at the last evaluation."""

    @monitor("forgotten", rows="V6", title="every class is predicted")
    def check(history: list[dict[str, float]]) -> Finding:
        recall = {k.removeprefix("val/recall/"): v for k, v in history[-1].items() if k.startswith("val/recall/")}
        never = [c for c, r in recall.items() if r < 0.01]
        worst = min(recall, key=recall.get) if recall else ""
        least = f"lowest recall: {worst}, {recall[worst]:.3f}" if recall else "no class occurs"
        more = f" and {len(never) - 5} more of {len(recall)} classes" if len(never) > 5 else ""
        one = len(recall) > 2 and len(never) == len(recall) - 1
        return Finding(
            not never, f"recall below 1%: {', '.join(never[:5])}{more}" if never else least,
            "a recall above 1% for every class that occurs", ONE_CLASS if one else remedy, evidence={"recall": recall},
        )  # fmt: skip

    return check


ONE_CLASS = "every sample gets the same class: the model has learnt nothing yet (if the loss falls: more --train.epochs), or nothing any more"
forgotten = _every_class("a rare class against a large background: --dice, --focal, or more windows in which it occurs")
forgotten_box = _every_class(
    "if the loss still falls: more --train.epochs; if the class is rare in training: more pictures in which it occurs; if its scores are "
    "low: a smaller --score-thresh"
)


def forgotten_class(uneven: bool) -> Monitor:
    """The same for classes of pictures. `uneven`: some have far fewer training samples than others."""
    rare = "if the class is rare in training: --balance.by weights or sampler; " * uneven
    return _every_class(
        f"{rare}if the loss still falls: more --train.epochs; if not: the evaluation reads its pictures differently (channels, scale, order "
        "of classes)"
    )
