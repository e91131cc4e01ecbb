"""Gates on images: scale of the net's input (V1), class balance (V6), and a monitor of classes that are never predicted (V6). For
semantic segmentation: ids in masks (V5), the pixels that loss and metric score (V5), one transform for image and mask (V2, V5).

The gates of segmentation need data of type masks.Windows, samples with `image` and `mask`, and logits (B, n, H, W).
"""

import copy
import math
from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from trainworthy.core.base.doubles import to_double
from trainworthy.core.base.modes import hooked
from trainworthy.core.base.verdict import Finding, Skip
from trainworthy.core.gates import gate
from trainworthy.core.gates.gate import GateContext, fetch, pick
from trainworthy.core.loop.run import Run, evaluating
from trainworthy.core.monitoring.monitors import Monitor, monitor
from trainworthy.core.recipe.stage import Data, Stage, View
from trainworthy.recipes.vision.data import masks
from trainworthy.recipes.vision.data.masks import IGNORE
from trainworthy.recipes.vision.evaluation import segmentation
from trainworthy.recipes.vision.gates import answers, objective, stored_masks
from trainworthy.recipes.vision.gates.joint_transforms import joint_transforms, outputs

SAMPLES, WINDOWS = 16, 200
# Limits of the first layer's input: standard deviation of a channel, distance of its mean from 0.
SPREAD, OFF = (0.2, 4.0), 2.5
EVEN = 1.2  # largest ratio between the shares of two classes in the loss
# Of the truth at the net's size, scored in stored pixels: least loss of IoU at its outlines that is asked for, and most.
OUTLINES, MISPLACED = 0.005, 0.1
SHIFT = 6  # pixels by which a prediction is moved: it is wrong along one side of every object


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
    say, names, wrong = {}, data.fields["label"].classes, []
    for label, i in sorted(first.items()):
        one = fetch(data, [i], None, run.device)
        with evaluating(stage.model), torch.no_grad(), run.autocast():
            plain = F.cross_entropy(stage.model(one["image"]).float(), one["label"], label_smoothing=smoothing)
            weighs = float(sum(stage.loss(stage.model, one).values()) / plain)
        divided = float(sum(stage.counts(one).values()))
        say[names[label]] = often[label] * weighs
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
        "the weights are those of another split, in another class order, or inverted\n"
        "the weights are in the loss but not in its denominator (counts), or sampler and weights are both on\n"
        "the sampler repeats samples of the wrong classes",
        evidence={"say": say, "often": {names[k]: v for k, v in often.items()}},
    )  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------- labels
@gate("labels", rows="V5", title="masks hold the stored class ids or void", reads="data model", explains=True)
def labels(context: GateContext) -> Finding:
    """Checks the values of masks on both paths. Over whole pictures it also compares the pixels of each class on the evaluation path
    with the stored masks: none lost, none counted twice, no id shifted. Stored masks must fit their own picture (stored_masks)."""
    (run, stage), n, seed = context.look(), outputs(context), context.cfg.run.seed
    wrong, measured, batch = [], [], None
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
            wrong.append(f"{name}: {counts}{by_one}")
    stored = [(f"{name}: {fault}", cause) for name, data in stage.data.items() if name != "test"
              for fault, cause in stored_masks.faults(data)]  # fmt: skip
    wrong += [fault for fault, _ in stored]
    return Finding(
        not wrong, "; ".join(wrong or measured), f"0 to {n - 1}, or {IGNORE} for void; each stored pixel read once, as its class",
        "ids start at 1, or 0 means void: shift them once, where masks are loaded\n"
        "masks are resized by interpolation, which makes new ids: use nearest neighbour\n"
        "the masks have another number of classes than the net, or number instances", batch=batch if wrong else None,
        cause="\n".join(dict.fromkeys(cause for _, cause in stored)),
    )  # fmt: skip


def _pixels(data: Data, n: int) -> tuple[Tensor, Tensor]:
    """Return the pixels of each class, (n,), on the evaluation path and in the stored masks, over as many whole pictures as `WINDOWS`
    windows cover. Both are in stored pixels, also if pictures are resized."""
    chosen = _whole(data)
    count = lambda mask: to_double(mask.flatten().long().bincount(minlength=256)[:n])  # noqa: E731
    read = {row: torch.zeros(n, dtype=torch.float64) for row in chosen}
    for i, place in enumerate(data.places):
        if place[0] in read:
            read[place[0]] += count(data.get(i, None)["mask"])
    stored = {row: data.pairs[row][1] for row in chosen}
    area = {row: (stored[row].numel() / (data.sizes[row][0] * data.sizes[row][1])) for row in chosen}
    return sum(read[r] * area[r] for r in chosen), sum(count(m) for m in stored.values())


def _whole(data: Data) -> list[int]:
    """Return as many pictures as `WINDOWS` windows cover, at least one."""
    rows, chosen = Counter(place[0] for place in data.places), []
    for row, windows in rows.items():
        if not chosen or windows + sum(rows[r] for r in chosen) <= WINDOWS:
            chosen.append(row)
    return chosen


# ----------------------------------------------------------------------------------------------------------------- scored
class Said(nn.Module):
    """A net that returns fixed logits and keeps them for their gradient."""

    def __init__(self, logits: Tensor):
        super().__init__()
        self.logits = logits.requires_grad_()

    def forward(self, images: Tensor) -> Tensor:
        return self.logits


class Knowing(nn.Module):
    """A net that returns the mask of each picture, moved to the right by `by` pixels and by `off` ids. On void pixels it predicts
    stripes of all classes. If the evaluation turns a picture, its mask is turned with it, unless `straight`."""

    def __init__(self, batch: dict, n: int, *, by: int = 0, off: int = 0, straight: bool = False):
        super().__init__()
        self.stored, self.n, self.straight = answers.Stored(list(batch["image"])), n, straight
        stripes = torch.arange(batch["mask"].shape[2], device=batch["mask"].device) % n
        known = (torch.where(mask == IGNORE, stripes, mask + off).clamp(0, n - 1) for mask in batch["mask"])
        self.answers = [answer.roll(by, 1) for answer in known]

    def answer(self, image: Tensor) -> Tensor:
        row, turn = self.stored.find(image)
        turned = turn.apply(self.answers[row])
        return self.answers[row] if self.straight and self.answers[row].shape == turned.shape else turned

    def forward(self, images: Tensor) -> Tensor:
        answer = torch.stack([self.answer(image) for image in images])
        return nn.functional.one_hot(answer, self.n).permute(0, 3, 1, 2).float() * 20


def different(data: Data, n: int, seed: int) -> list[int]:
    """Return up to `n` samples with different pictures: `Knowing` finds its answer by the picture, and windows of flat drawings repeat."""
    found: dict[bytes, int] = {}
    for i in pick(data, min(4 * n, len(data)), seed):
        found.setdefault(data.get(i, None)["image"].numpy().tobytes(), i)
        if len(found) == n:
            break
    return list(found.values())


def with_net(stage: Stage, net: nn.Module) -> Stage:
    """Return the stage with another net to evaluate."""
    other = copy.copy(stage)
    other.model, other.ema_model = net, None
    return other


class Voided(View):
    """Samples whose masks have a void bar. They are scored at the size of the net's input."""

    def get(self, index: int, generator: torch.Generator | None) -> dict:
        sample = {k: v for k, v in super().get(index, generator).items() if not k.startswith("stored")}
        return {**sample, "mask": _barred(sample["mask"])}


def _barred(mask: Tensor) -> Tensor:
    side, mask = mask.shape[-2], mask.clone()
    mask[..., side // 4 : side // 2, :] = IGNORE
    return mask


@gate(
    "scored",
    rows="V5",
    title="loss and metric score the same pixels with the same classes",
    reads="data model loss evaluate metric",
    explains=True,
)
def scored(context: GateContext) -> Finding:
    """Reads the pixels that count in the loss, and their classes, from the loss's gradient with respect to the logits. Then it evaluates
    the ground truth, which must score the metric's ceiling, and the ground truth moved to the right, whose numbers must be those over
    all pixels together, counted here. A bar of each mask is void; predictions there must not matter."""
    (run, stage), n, seed = context.look(), outputs(context), context.cfg.run.seed
    train, val = stage.data["train"], stage.data["val"]
    seen = Voided(train, pick(train, min(SAMPLES, len(train)), seed))
    batch = fetch(seen, list(range(len(seen))), seed, run.device)
    learnt = _learnt(stage, batch, n)
    wrong = learnt or []
    held_out = Voided(val, different(val, SAMPLES, seed))
    truth = fetch(held_out, list(range(len(held_out))), None, run.device)
    name = stage.metric.name

    used: set[str] = set()
    reported: dict[str, float] = {}

    def value(**how: int) -> float:
        net = Knowing(truth, n, **how)
        reported.clear()
        reported.update(run.measure(with_net(stage, net), held_out))
        used.update(net.stored.turned)
        return reported[name]

    cause, moved = "", Knowing(truth, n, by=SHIFT)
    try:
        best, got = value(), value(by=SHIFT)
    except Skip:  # the evaluation asks for pictures without a known answer
        if not wrong:
            raise
        best = got = math.nan
    if used and best < stage.metric.ceiling - 1e-3 and value(straight=True) > max(best, stage.metric.ceiling - 1e-3):
        cause = f"evaluate() asks about pictures {' and '.join(sorted(used))}, and does not turn these answers back"
    if abs(best - stage.metric.ceiling) > 1e-3:
        other = {off: value(off=off) for off in (1, -1)}
        shift = max(other, key=other.get)
        by_one = (
            f"; ids {shift:+d} score {other[shift]:.3f}: evaluation reads them shifted by one"
            if other[shift] > best + 0.05
            else ""
        )
        wrong.append(f"the ground truth as prediction has {name} {best:.3f}{by_one}")
    due = definitions(truth["mask"], moved(truth["image"]).argmax(1), getattr(val, "classes", range(n)))
    off = [k for k in (name, *due) if k in due and k in reported and abs(reported[k] - due[k]) > 1e-3]
    if off and not wrong:
        k = off[0]
        wrong.append(
            f"a prediction {SHIFT} pixels to the right has {k} {reported[k]:.3f}, over all pixels together {due[k]:.3f}"
        )
        each = zip(truth["mask"], moved(truth["image"]).argmax(1), strict=True)
        cause = averaged(
            k, reported[k], [definitions(m[None], a[None], getattr(val, "classes", range(n))) for m, a in each]
        )
    if not wrong and getattr(val, "resize", 0):
        wrong += _unlike_stored(run, stage, val, n)
    measured = (
        "the loss reads more of the net than its output: not compared; " if learnt is None else
        f"the loss uses the class of each of {int((batch['mask'] != IGNORE).sum()):,} pixels and no void pixel; "
    )  # fmt: skip
    return Finding(
        not wrong, "; ".join(wrong) or measured + f"{name} {best:.3f} for the ground truth, {got:.3f} for the ground truth moved by {SHIFT} pixels",
        f"void ({IGNORE}) neither in the loss nor in the metric, every class learnt as itself, {name} {stage.metric.ceiling:g} for the "
        "ground truth, and for a moved one every number as it is over all pixels together",
        "the loss has another ignore_index than the metric, or none: use one constant\n"
        "ids are shifted in the loss or in the metric\n"
        "predictions are compared with resized masks: enlarge the logits and compare with the stored pixels\n"
        "the metric is a mean of the IoU of pictures or batches: add up the counts first\n"
        "a number is another than its name says (precision for recall)",
        batch=batch if wrong else None, evidence={"truth": best, "moved": got, "expected": due.get(name)}, cause=cause,
    )  # fmt: skip


def definitions(mask: Tensor, answer: Tensor, classes: Iterable) -> dict[str, float]:
    """Return what an evaluation may report of answers (N, H, W), as sets of pixels: IoU and recall of each class, their means."""
    known, classes = mask != IGNORE, list(classes)
    true, predicted = ([(ids == c) & known for c in range(len(classes))] for ids in (mask, answer))
    both, either = (
        [int(one(t, s).sum()) for t, s in zip(true, predicted, strict=True)]
        for one in (torch.logical_and, torch.logical_or)
    )
    iou = {f"iou/{c}": hit / union for c, hit, union in zip(classes, both, either, strict=True) if union}
    recall = {f"recall/{c}": hit / int(t.sum()) for c, hit, t in zip(classes, both, true, strict=True) if t.any()}
    right = int((mask == answer)[known].sum()) / max(1, int(known.sum()))
    alone = {"iou": iou[f"iou/{classes[1]}"]} if len(classes) == 2 and either[1] else {}
    return {**alone, "miou": sum(iou.values()) / max(1, len(iou)), "pixel_accuracy": right, **iou, **recall}


def averaged(name: str, got: float, each: list[dict[str, float]]) -> str:
    """Return which mean over pictures a number `got` is, of the numbers of each; empty if it is none."""
    for absent, why in ((None, "left out"), (1.0, "counted as 1"), (0.0, "counted as 0")):
        found = [v for one in each if (v := one.get(name, absent)) is not None]
        if found and abs(sum(found) / len(found) - got) <= 1e-3:
            without = f", with pictures that have no such pixel {why}" * (len(found) < len(each) or absent is not None)
            return f"{name} is a mean over pictures{without}: add up the counts of all pictures first"
    return ""


def _learnt(stage: Stage, batch: dict, n: int) -> list[str] | None:
    """Return what is wrong with the pixels and classes in the loss; None if it reads more of the net than its output."""
    mask, wrong = batch["mask"], []
    logits = torch.randn(len(mask), n, *mask.shape[1:], generator=torch.Generator().manual_seed(0)).to(mask.device)
    net = Said(0.1 * logits)
    try:
        total = sum(stage.loss(net, batch).values())
    except (AttributeError, TypeError):  # deep supervision: the loss reads more of the net than its output
        return None
    grad = torch.autograd.grad(total, net.logits)[0]
    touched, pulled, void = grad.abs().amax(1) > 0, (-grad).argmax(1), mask == IGNORE
    if touched[void].any():
        wrong.append(f"the loss learns from {int(touched[void].sum()):,} of {int(void.sum()):,} pixels of void")
    deaf = [c for c in mask[~void].unique().tolist() if not touched[mask == c].any()]
    if deaf:
        wrong.append(f"the loss ignores class {', '.join(map(str, deaf[:5]))}, whose pixels are not void")
    heard = touched & ~void
    share = lambda off: to_double((pulled == mask + off)[heard]).mean().item()  # noqa: E731
    if heard.any() and share(0) < 0.95:
        off = max((1, -1), key=share)
        by_one = f", {share(off):.0%} of them one id off ({off:+d})" if share(off) > share(0) else ""
        wrong.append(f"the loss expects another class than the mask at {1 - share(0):.0%} of the pixels{by_one}")
    return wrong


def _unlike_stored(run: Run, stage: Stage, data: masks.Windows, n: int) -> list[str]:
    """Return what is wrong with the score of masks that were resized for the net: of whole pictures, in stored pixels."""
    chosen, counts = _whole(data), torch.zeros(n, n, dtype=torch.long)
    indices = [i for i, place in enumerate(data.places) if place[0] in chosen]
    batch = fetch(data, indices, None, run.device)
    batch["mask"] = batch["mask"].clone()
    for row in chosen:
        mask, stored = data.whole(row)[1].as_subclass(Tensor).long(), data.pairs[row][1].long()
        nearest = F.interpolate(mask[None, None].float(), stored.shape, mode="nearest-exact")[0, 0].long()
        counts += segmentation.counted(stored, nearest.where(nearest != IGNORE, 0), n)
        for at, i in enumerate(indices):
            if data.places[i][0] == row:  # what other windows score is known, too: no seams
                top, left = data.places[i][1:3]
                part = mask[top : top + data.window, left : left + data.window]
                batch["mask"][at, : part.shape[0], : part.shape[1]] = part
    name, cells = stage.metric.name, data.window**2
    got = run.measure(with_net(stage, Knowing(batch, n)), View(data, indices))[name]
    best = segmentation.scores(counts, [str(c) for c in range(n)])[name]
    small, large = (f"{w}x{h}" for h, w in (data.sizes[chosen[0]], data.stored_sizes[chosen[0]]))
    if got > 1 - 1e-4 and best < 1 - OUTLINES:
        return [f"masks are scored at the net's size ({small}, {cells:,} pixels a window) and not in their {large} stored pixels: the resized "
                f"truth has {name} {got:.3f} there, {best:.3f} in stored pixels"]  # fmt: skip
    if got < best - MISPLACED:
        return [
            f"the truth, resized to {small} and back, has {name} {got:.3f} in stored pixels ({large}); {best:.3f} is possible"
        ]
    return []


# ------------------------------------------------------------------------------------------------------------------ scale
@gate("scale", rows="V1", title="the first layer's input is normalised exactly once, on both paths", reads="data model")
def scale(context: GateContext) -> Finding:
    """Measures mean and standard deviation of each channel at the input of the first layer with weights."""
    (run, stage), seed = context.look(), context.cfg.run.seed
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for path, name, draws in (("training", "train", seed), ("evaluation", "val", None)):
        data = stage.data[name]
        reached = _first_input(
            stage.model, fetch(data, pick(data, min(SAMPLES, len(data)), seed), draws, run.device)["image"]
        )
        flat = to_double(reached.cpu()).transpose(0, 1).flatten(1)  # (C, B x H x W)
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
        "normalised twice: by the data and by the model\npictures of 0-255 instead of 0-1, or never normalised\n"
        "mean and std belong to other weights or other pictures",
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
        return Finding(
            not never, f"recall below 1%: {', '.join(never[:5])}{more}" if never else least,
            "a recall above 1% for every class that occurs", remedy, evidence={"recall": recall},
        )  # fmt: skip

    return check


forgotten = _every_class("a rare class against a large background: --dice, --focal, or more windows in which it occurs")
forgotten_box = _every_class(
    "if the loss still falls: more --train.epochs; if the class is rare in training: more pictures in which it occurs; if its scores are "
    "low: a smaller --score-thresh"
)
forgotten_class = _every_class(
    "if the class is rare in training: --balance.by weights or sampler; if the loss still falls: more --train.epochs; if neither: the "
    "evaluation reads its pictures differently (channels, scale, order of classes)"
)
