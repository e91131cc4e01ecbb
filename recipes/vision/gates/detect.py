"""Gates of detection: boxes match their objects (V3), the metric of the ground truth (V3), detections in the pixels of the original
image (V3), score threshold and NMS (V4), an anchor or location for every object (V4).

They need data of type boxes.Boxed, a model of type detectors.Detector, and a `stage.evaluate` that reads both.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.ops import box_iou
from trainworthy.core.base import seeds
from trainworthy.core.base.doubles import to_double
from trainworthy.core.base.verdict import Finding, Skip
from trainworthy.core.gates import gate
from trainworthy.core.gates.checks.learning import overfitted
from trainworthy.core.gates.gate import GateContext, fetch, own_size, pick, split_evenly
from trainworthy.core.loop.run import evaluating
from trainworthy.core.recipe.stage import Data, Stage, View
from trainworthy.recipes.vision.data import boxes
from trainworthy.recipes.vision.gates import answers, detection, pictures, scored
from trainworthy.recipes.vision.gates.boxes import (
    MEANINGS,
    PAINTED,
    SAMPLES,
    Change,
    lie_on,
    of_one_picture,
    painted,
    twin,
)
from trainworthy.recipes.vision.models import detectors

NEAR_ONE = 0.999
OVERFIT = 0.85  # mAP on eight memorised pictures that are read a little differently
FEWEST = 4  # of these pictures, without mosaics
DOUBLE = 0.75  # IoU from which two boxes of one class count as one object
FULL = 10  # boxes per object
CROWDED = 100  # objects in a picture above which the ground truth scores below 1: COCO's metric takes 100 boxes
KEPT = 0.9  # share of the training objects for which a picture must have room among the boxes that are kept
TURNED = 0.05  # rise of the mean best IoU by exchanged sides of anchors; anchors that were fitted or come in pairs do not rise
REACHED = 0.8  # share of the objects; the smallest of COCO match no anchor of healthy nets


# --------------------------------------------------------------------------------------------------------------- precision
class Knowing(nn.Module):
    """A detector that returns the stored annotations of each picture, after `change`. If the evaluation turns a picture, its boxes are
    turned with it."""

    def __init__(
        self, data: boxes.Boxed, indices: Sequence[int], device: torch.device, change: Callable[[dict], dict] = dict
    ):
        super().__init__()
        self.stored = answers.Stored([data.get(i, None)["image"] for i in indices])
        self.answers: list[dict] = []
        for i in indices:
            row = data.rows[i]
            h, w = data.data.sizes[row]
            high, wide = data.resized(h, w)
            scale = torch.tensor([wide / w, high / h])
            labels = data.data.labels[row]
            known = {
                "boxes": data.data.boxes[row] * scale.repeat(2),
                "labels": labels,
                "scores": torch.full((len(labels),), 0.9),
            }
            known = change(known | {"scale": scale, "size": torch.tensor([h, w])})
            self.answers.append({k: v.to(device) for k, v in known.items()})

    def answer(self, image: Tensor) -> dict:
        row, turn = self.stored.find(image.cpu())
        known, size = self.answers[row], tuple(image.shape[-2:])
        return known if turn is answers.SAME else known | {"boxes": turn.boxes(known["boxes"], size)}

    def forward(self, images: Tensor) -> list[dict]:
        return [self.answer(image) for image in images]


def relabelled(by: int, n: int) -> Callable[[dict], dict]:
    return lambda answer: answer | {"labels": (answer["labels"] + by) % n}


def without(k: int) -> Callable[[dict], dict]:
    return lambda answer: answer | {n: answer[n][answer["labels"] != k] for n in ("boxes", "labels", "scores")}


def moved(answer: dict) -> dict:
    """Move every box by its width, off its object."""
    by = (answer["boxes"][:, 2:] - answer["boxes"][:, :2]) * torch.tensor([1.0, 0.0])
    return answer | {"boxes": answer["boxes"] + by.repeat(1, 2)}


def meaning(change: Change, side: float) -> Callable[[dict], dict]:
    return lambda answer: answer | {"boxes": torch.stack([change(b, answer["scale"], answer["size"], side) for b in answer["boxes"]])
                                if len(answer["boxes"]) else answer["boxes"]}  # fmt: skip


READ_AS: dict[str, Change] = {
    "it reads boxes on the canvas as boxes on the picture": lambda b, scale, size, side: b / scale.repeat(2),
    "it reads boxes on the picture as boxes on the canvas": lambda b, scale, size, side: b * scale.repeat(2),
    "it reads them as xywh": lambda b, *_: torch.cat([b[:2], b[2:] - b[:2]]),
    "it converts them to xywh": lambda b, *_: torch.cat([b[:2], b[:2] + b[2:]]),
    "it reads them as normalised boxes": lambda b, scale, size, side: b / side,
}


@gate(
    "precision",
    rows="V3",
    title="the ground truth as prediction scores 1, other boxes and classes near 0",
    reads="data evaluate metric",
)
def precision(context: GateContext) -> Finding:
    """Evaluates a detector that returns the stored boxes, on validation pictures and on painted ones of many sizes. It must score an
    average precision of 1; with other classes, or with boxes moved off their objects, near 0. If not, the misreading that scores best is
    reported as the likely cause."""
    (run, stage), seed = context.look(), context.cfg.run.seed
    val, name, n = stage.data["val"], stage.metric.name, len(stage.data["val"].data.classes)
    wrong, measured, evidence, cause = [], [], {}, ""
    objects = lambda i: len(val.data.labels[val.rows[i]])  # noqa: E731
    real = [i for i in pick(val, min(SAMPLES, len(val)), seed) if objects(i) <= CROWDED]
    other = twin(val, painted(val.data, val.side, PAINTED, min(3, val.most)))
    for what, data, indices in (
        ("held-out pictures", val, real),
        ("pictures of other sizes", other, list(range(PAINTED))),
    ):

        def value(
            change: Callable[[dict], dict] = dict, data: boxes.Boxed = data, indices: list[int] = indices
        ) -> float:
            return run.measure(scored.with_net(stage, Knowing(data, indices, run.device, change)), View(data, indices))[
                name
            ]

        best = value()
        evidence[what] = best
        measured.append(f"{best:.3f} on {what}")
        if best < NEAR_ONE:
            tried = {f"class ids {by:+d}: they are off by one": value(relabelled(by, n)) for by in (1, -1)}
            tried |= {why: value(meaning(change, val.side)) for why, change in READ_AS.items()}
            likely = max(tried, key=tried.get)
            because = f"; {tried[likely]:.3f} with {likely}" if tried[likely] > best + 0.2 else ""
            wrong.append(f"the ground truth as prediction has {name} {best:.3f} on {what}{because}")
            continue
        if what == "held-out pictures" and not any(map(objects, real)):
            continue  # without objects there is nothing to move or relabel
        fooled = {"boxes moved off their objects": value(moved)}
        fooled |= {"other classes": value(relabelled(1, n))} if n > 1 else {}
        wrong += [f"{k} have {name} {v:.3f} on {what}" for k, v in fooled.items() if v > 0.5]
        present = sorted({k for i in indices for k in data.data.labels[data.rows[i]].tolist()})
        for k in {present[0], present[-1]} if len(present) > 1 and not wrong else ():
            if (left := value(without(k))) > 1 - 0.5 / len(present):
                kind = f"class {val.data.classes[k]} (id {k})"
                wrong.append(f"without the boxes of {kind} the ground truth still has {name} {left:.3f} on {what}")
                cause = (
                    f"objects of {kind} are left out of the truth: its id is taken for the background or for padding"
                )
    return Finding(
        not wrong, "; ".join(wrong) or f"{name} of the ground truth: {', '.join(measured)}; of moved boxes and other classes: below 0.5",
        f"{name} 1 for the ground truth on pictures of any size; at most 0.5 for moved boxes and other classes",
        "boxes are scored in pixels of the canvas, or scaled twice: convert to pixels of the picture once\n"
        "class ids start at 0 in one place and at 1 in another\nthe evaluator expects another box format than the predictions have",
        evidence=evidence, cause=cause,
    )  # fmt: skip


# -------------------------------------------------------------------------------------------------------------- own pixels
class ByOtherHands(Data):
    """Samples of boxes.Boxed made without its code: the same stored picture and random draws, resized and padded here."""

    def __init__(self, data: boxes.Boxed, indices: Sequence[int], seed: int):
        self.data, self.indices, self.seed, self.fields = data, indices, seed, data.fields

    def __len__(self) -> int:
        return len(self.indices)

    def get(self, index: int, generator: torch.Generator | None) -> dict[str, Tensor]:
        i, side = self.indices[index], self.data.side
        row = self.data.rows[i]
        picture, known, labels = (
            one[row] for one in (self.data.data.pictures, self.data.data.boxes, self.data.data.labels)
        )
        if self.data.augment is not None:
            seeds.seed_sample(self.seed, "sample", 0, index)  # torchvision draws from the global generator
            size = tuple(picture.shape[-2:])
            image = boxes.tv_tensors.Image(picture.float() / 255)
            image, known, labels = self.data.augment(image, boxes.canonical(known, size), labels)
            picture = image.as_subclass(Tensor) * 255
        known, (h, w) = torch.as_tensor(known).as_subclass(Tensor), picture.shape[-2:]
        whole = not self.data.shorter or side / max(h, w) <= self.data.shorter / min(h, w)
        high, wide = (round(s * side / max(h, w) if whole else s * self.data.shorter / min(h, w)) for s in (h, w))
        small = F.interpolate(
            picture[None].float() / 255, (high, wide), mode="bilinear", antialias=True, align_corners=False
        )[0]
        canvas = torch.zeros(3, side, side) + torch.tensor(self.data.fill or (0.0,)).view(-1, 1, 1)
        canvas[:, :high, :wide] = small.clamp(0, 1)
        fill = self.data.most - len(labels)
        scale = torch.tensor([wide / w, high / h])
        rows = lambda b: torch.cat([b, b.new_zeros(fill, 4)])  # noqa: E731
        return {"image": canvas, "truth": rows(known), "boxes": rows(known * scale.repeat(2)), "scale": scale,
                "size": torch.tensor([h, w]), "labels": F.pad(labels, (0, fill), value=-1), "seed": torch.tensor(0)}  # fmt: skip


class Altered(nn.Module):
    """A detector whose answers are changed."""

    def __init__(self, net: nn.Module, change: Callable[[dict], dict]):
        super().__init__()
        self.net, self.change = net, change

    def forward(self, images: Tensor) -> list[dict]:
        return [self.change(answer) for answer in self.net(images)]


@gate("own-pixels", rows="V3", title="memorised objects are found in the original images, in their own pixels",
      reads="data model loss counts evaluate metric optimizers train")  # fmt: skip
def own_pixels(context: GateContext) -> Finding:
    """Evaluates the overfit model on its eight memorised pictures, read without the recipe's data code. Bugs that shift picture and
    boxes together score 1.00 through the pipeline that they were trained with, but not here."""
    run, stage, found = overfitted(context)
    if "loss" not in found:
        raise Skip("the training loop made no step (see overfit)")
    train, name, n = stage.data["train"], stage.metric.name, len(stage.data["train"].data.classes)
    learnt = View(train, found["indices"], draws=context.cfg.run.seed)
    alone = of_one_picture(learnt, [train.data.labels[train.rows[i]] for i in found["indices"]])
    if len(alone) < FEWEST:
        raise Skip("nearly every training sample shows objects of several pictures: none is memorised by itself")
    data = View(ByOtherHands(train, found["indices"], context.cfg.run.seed), alone)
    value, through = (run.measure(stage, part)[name] for part in (data, View(learnt, alone)))
    because = ""
    if value < OVERFIT:
        changes = {f"class ids {by:+d}: they are off by one": relabelled(by, n) for by in (1, -1)}
        for why, change in MEANINGS.items():
            if "scale" not in why:
                sized = {"scale": torch.ones(2), "size": torch.tensor([train.side, train.side])}
                changes[f"boxes that {why}"] = lambda answer, change=change, sized=sized: {
                    k: v for k, v in meaning(change, train.side)(answer | sized).items() if k not in sized}  # fmt: skip
        altered = {why: scored.with_net(stage, Altered(stage.eval_model, change)) for why, change in changes.items()}
        tried = {why: run.measure(other, data)[name] for why, other in altered.items()}
        likely = max(tried, key=tried.get)
        because = f"; {tried[likely]:.3f} with {likely}" if tried[likely] > value + 0.2 else ""
    batch = fetch(data, list(range(len(data))), None, run.device)
    measured = f"{name} {value:.3f} on {len(data)} memorised pictures, read independently of the recipe ({through:.3f} through its pipeline)"
    return Finding(
        value >= OVERFIT, measured + because, f"{OVERFIT:g} or more",
        "the data path moves the picture relative to its boxes (see boxes), or moves both in a way that does not happen at inference\n"
        "the loss uses other classes or boxes than the evaluation\nthe net did not memorise eight pictures (see overfit)",
        batch=None if value >= OVERFIT else batch, evidence={"own": value, "pipeline": through},
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- suppression
@gate("suppression", rows="V4", title="score threshold and NMS leave one box for each object",
      reads="data model loss counts optimizers train")  # fmt: skip
def suppression(context: GateContext) -> Finding:
    """Counts the boxes of the overfit model on its memorised pictures, before and after NMS. Nearly every object must be found before
    NMS and after it, few of them twice, and most pictures must have fewer boxes than the limit. The untrained model's count is shown for
    comparison; zero is healthy."""
    run, stage, found = overfitted(context)
    if "loss" not in found:
        raise Skip("the training loop made no step (see overfit)")
    data, model = stage.data["train"], stage.eval_model
    learnt = View(data, found["indices"], draws=context.cfg.run.seed)
    batch = fetch(learnt, list(range(len(learnt))), None, run.device)
    with evaluating(model), torch.no_grad(), run.autocast():
        after = model(batch["image"])
        with detectors.without_nms(model):
            before = model(batch["image"])
        fresh = context.look()[1].model
        with evaluating(fresh):
            untrained = sum(len(s["boxes"]) for s in fresh(batch["image"]))
    known = [{"boxes": b[y >= 0], "labels": y[y >= 0]} for b, y in zip(batch["boxes"], batch["labels"], strict=True)]
    objects = sum(len(k["labels"]) for k in known)
    n = {
        "before": sum(len(s["boxes"]) for s in before),
        "after": sum(len(s["boxes"]) for s in after),
        "untrained": untrained,
    }
    seen = {"before": _found(before, known), "after": _found(after, known)}
    twice, most = sum(map(_doubles, after)), model.limits.detections_per_img
    full = sum(len(s["boxes"]) >= most for s in after)
    wrong, kept = [], _capped(context.look()[1], most)
    if kept < KEPT:
        wrong.append(
            f"at most {most} boxes of a picture are kept: {1 - kept:.0%} of the training objects cannot be found"
        )
    if seen["before"] < 0.9 * objects:
        wrong.append(
            f"{objects - seen['before']} of {objects} objects have no box above the score {model.limits.score_thresh:g}"
        )
    elif seen["after"] < seen["before"] - 0.1 * objects:
        wrong.append(f"NMS removes {seen['before'] - seen['after']} of {objects} objects that were found before it")
    if twice > 0.2 * max(n["after"], 1):
        wrong.append(f"{twice} of {n['after']} boxes overlap a better box of their class: NMS does nothing")
    if full > 0.5 * len(after) and most > FULL * objects / len(after):
        wrong.append(
            f"{full} of {len(after)} pictures have the maximum of {most} boxes, with {objects / len(after):.1f} objects each"
        )
    measured = (
        f"{n['before']} boxes before NMS, {n['after']} after it, for {objects} objects, {seen['after']} of them found"
    )
    return Finding(
        not wrong, "; ".join([*wrong, measured]) + f" (untrained: {untrained} boxes)",
        f"90% of the objects found before and after NMS; at most 20% of the boxes doubled; fewer than {FULL} boxes per object; "
        f"room for {KEPT:.0%} of the objects",
        f"--detections-per-img {most} is below the number of objects in a picture: raise it\n" * (kept < KEPT)
        + "--score-thresh: too high drops detected objects, too low fills every picture with boxes\n"
        "--nms-thresh: at 1 no box is dropped; near 0 neighbouring objects of one class are. NMS must get all boxes of a picture in one call\n"
        "the net did not memorise eight pictures (see overfit)", evidence=n | {"objects": objects, "found": seen, "twice": twice},
    )  # fmt: skip


def _capped(stage: Stage, most: int) -> float:
    """Return the share of the training objects that could be found if every picture kept its `most` best boxes."""
    data = stage.data["train"]
    sizes = [len(data.data.labels[row]) for row in data.rows]
    return sum(min(n, most) for n in sizes) / max(1, sum(sizes))


def _found(answers: list[dict], known: list[dict]) -> int:
    """Return the number of objects that have a box of their class at an IoU of 0.5."""
    hits = 0
    for s, k in zip(answers, known, strict=True):
        if len(s["boxes"]) and len(k["boxes"]):
            same = s["labels"][:, None] == k["labels"][None]
            hits += int(((box_iou(s["boxes"].float(), k["boxes"].float()) >= 0.5) & same).any(0).sum())
    return hits


def _doubles(answer: dict) -> int:
    """Return the number of boxes that overlap a better one of their class."""
    if len(answer["boxes"]) < 2:
        return 0
    same = (answer["labels"][:, None] == answer["labels"][None]) & (
        box_iou(answer["boxes"].float(), answer["boxes"].float()) > DOUBLE
    )
    return int(same.tril(-1).any(1).sum())


# ----------------------------------------------------------------------------------------------------------------- reached
@gate("anchor-matching", rows="V4", title="every object is assigned an anchor or a location", reads="data model")
def anchor_matching(context: GateContext) -> Finding:
    """Takes up to 2,000 training boxes on the canvas. The best IoU of each with any anchor must be at least 0.5, and its mean must not rise
    clearly if widths and heights of the anchors are exchanged. FCOS has no anchors: there each box needs a location that is assigned to it."""
    run, stage = context.look()
    data, model = stage.data["train"], stage.model
    targets: list[dict[str, Tensor]] = []
    for part in split_evenly(
        pick(data, min(500, len(data)), context.cfg.run.seed), own_size(run)
    ):  # pictures are large
        batch = fetch(data, part, None, run.device)
        targets += boxes.targets(batch)
    found, shape, rise = [t["boxes"] for t in targets], (len(targets), *batch["image"].shape[1:]), 0.0
    if isinstance(model, detectors.Fcos):
        matched = model.matches(shape, targets)
        hit = torch.cat(
            [torch.isin(torch.arange(len(b), device=b.device), m) for b, m in zip(found, matched, strict=True)]
        )
        what = "boxes have a location assigned"
    else:
        anchors, some = model.anchors(shape), torch.cat(found)[:2000]
        best = detectors.best_overlap(anchors, some)
        rise = (detectors.best_overlap(detectors.turned(anchors), some) - best).mean().item()
        hit, what = (
            best >= 0.5,
            f"boxes have an anchor with an IoU of at least 0.5 (mean of the best IoU: {best.mean():.2f})",
        )
    every = torch.cat(found)[: len(hit)]
    share = to_double(hit).mean().item()
    sides = every[:, 2:] - every[:, :2]
    lost = sides[~hit].median(0).values.tolist() if share < 1 else [0, 0]
    missed = f"; the others measure {lost[0]:.0f} x {lost[1]:.0f} pixels of the canvas (median)" if share < 1 else ""
    why = f"widths and heights of the anchors are exchanged: turned, they fit the boxes better (mean of the best IoU {rise:+.2f})"
    return Finding(
        share >= REACHED and rise < TURNED, f"{share:.1%} of {len(hit):,} {what}{missed}", f"{REACHED:.0%}, and no better fit if turned",
        "objects are too small for the net's stride: use a larger --image-size or fewer --widths\n"
        "the anchors were made for another data set: --backbone small fits them to the boxes (--anchors); else change --image-size\n"
        "the boxes have another scale than the canvas (see boxes)", evidence={"share": share, "turned": rise}, cause=why if rise >= TURNED else "",
    )  # fmt: skip


DETECTING = [lie_on, precision, own_pixels, suppression, anchor_matching, pictures.scale, detection.DETECT]
