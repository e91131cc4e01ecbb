"""The objectives of detection, written from their papers, independently of the recipe, and what a loss of another form must do.

The gate `formula` compares a loss with them, picture by picture and with its gradient, at weights that have moved.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from trainworthy.core.base.verdict import Skip
from trainworthy.core.gates.causes.place_weights import ASCENT
from trainworthy.core.gates.checks import formula
from trainworthy.core.gates.checks.formula import Statement, Statements
from trainworthy.core.gates.gate import GateContext
from trainworthy.core.recipe.stage import Stage
from trainworthy.recipes.vision.models import detectors

RADIUS = 1.5  # FCOS: of a level's stride, how far from the centre of its object a location may be
UNLIKELY = 0.1  # a class with a lower probability at its own object must be drawn there, also if its target is the overlap of the boxes
TERMS = ("classification", "bbox_regression", "bbox_ctrness")  # torchvision's names
MOST = 0.95  # share of the locations whose box must be drawn to its object's


@dataclass
class Assigned:
    """What the locations of a picture must learn."""

    labels: Tensor
    """(A,) class, -1 for background, -2 if not scored."""
    boxes: Tensor
    """(k, 4) the outputs that the boxes of the locations with a class must have."""


def detect(context: GateContext, stage: Stage, batch: dict) -> Statements:
    """FCOS (Tian 2019) or RetinaNet (Lin 2017), sums over a picture: focal loss of every location and class; for locations that are
    assigned to an object, also the error of its box."""
    model = stage.model
    if not isinstance(model, detectors.Dense):
        raise Skip("Faster R-CNN samples its training anchors at random: there is no formula for single samples")
    maps = list(model.features(batch["image"]).values())
    predicted = {k: v.float() for k, v in model.net.head(maps).items()}
    anchors = model.anchors(batch["image"].shape)
    per_cell = len(anchors) // sum(m.shape[-2] * m.shape[-1] for m in maps)
    levels = [m.shape[-2] * m.shape[-1] * per_cell for m in maps]
    rows = zip(batch["boxes"], batch["labels"], strict=True)
    truth = [{"boxes": b[y >= 0].float(), "labels": y[y >= 0]} for b, y in rows]
    one = fcos if isinstance(model, detectors.Fcos) else retinanet

    def stated(change: Callable[[Tensor], Tensor] = lambda boxes: boxes) -> list[tuple[dict[str, Statement], Assigned]]:
        """The terms of each picture, had its boxes been changed before they were matched."""
        return [one(model, {k: v[i] for k, v in predicted.items()}, anchors, levels, {**t, "boxes": change(t["boxes"])})
                for i, t in enumerate(truth)]  # fmt: skip

    each, others = stated(), {name: stated(change) for name, change in CHANGES.items()}
    terms = {term: _together([e[term] for e, _ in each]) for term in each[0][0]}
    for term, statement in terms.items():
        for name, pictures in others.items():
            statement.wrong[name] = torch.stack([next(iter(p[term].right.values())) for p, _ in pictures])
        statement.own = lambda term=term: _draws(stage, batch, term, [places for _, places in each])
    return terms


def _draws(stage: Stage, batch: dict, term: str, places: list[Assigned]) -> str:
    """Return what is wrong if a term of a fork's own (varifocal, CIoU, an overlap in place of the centerness) does not draw each location to
    what it was assigned; else ""."""
    seen: list[dict[str, Tensor]] = []

    def keep(_module: nn.Module, _args: tuple, out: dict[str, Tensor]) -> dict[str, Tensor]:
        seen.append({k: v.detach().requires_grad_() for k, v in out.items()})
        return seen[-1]

    output = {"classification": "cls_logits"}.get(term, term)
    with stage.model.net.head.register_forward_hook(keep), torch.enable_grad():
        total = formula.term_of(stage.loss(stage.model, batch), term, TERMS)
        if len(seen) != 1 or output not in seen[0] or not total.requires_grad:
            return "the gradient of single locations cannot be read"
        slope = torch.autograd.grad(total, seen[0][output], allow_unused=True)[0]
    if slope is None:
        return "it does not depend on the net's output"
    for given, up, place in zip(seen[0][output].detach(), slope, places, strict=True):
        mine = place.labels >= 0
        if output == "cls_logits":
            fault = _classes_drawn(given, up, place.labels)
        elif (up[~mine].abs() > ASCENT * slope.abs().max()).any():
            fault = "locations without an object change it"
        elif output == "bbox_regression" and mine.any():
            drawn = (up[mine] * (given[mine] - place.boxes)).sum(1) > 0
            fault = f"{int((~drawn).sum())} of {len(drawn)} boxes are not pulled to their objects" * (
                drawn.float().mean() < MOST
            )
        else:
            due = (given.sigmoid() - up)[mine]  # of a binary cross-entropy
            fault = "its target is no number between 0 and 1" * bool(((due < -ASCENT) | (due > 1 + ASCENT)).any())
        if fault:
            return fault
    return ""


def _classes_drawn(logits: Tensor, slope: Tensor, labels: Tensor) -> str:
    """Return what is wrong with the gradient (A, n) of the class logits."""
    truth = F.one_hot(labels.clamp_min(0), logits.shape[1]).bool() & (labels >= 0)[:, None]
    faint, least = logits.sigmoid() < UNLIKELY, ASCENT * slope.abs().max()
    if not slope.any():
        return "no location has a gradient"
    if n := int((truth & faint & (slope > least)).sum()):
        return f"{n} locations are pushed away from the class of their object"
    if n := int((~truth & (labels > -2)[:, None] & (slope < -least)).sum()):
        return f"{n} scores of other classes are pushed up"
    return ""


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "boxes are cut to whole pixels": lambda b: b.floor(),
    "boxes are rounded to whole pixels": lambda b: b.round(),
    "boxes are half a pixel up and left: corners are taken for centres of pixels": lambda b: b - 0.5,
    "boxes are half a pixel down and right: centres of pixels are taken for corners": lambda b: b + 0.5,
    "boxes end one pixel early": lambda b: b - b.new_tensor([0, 0, 1, 1]),
    "boxes end one pixel late": lambda b: b + b.new_tensor([0, 0, 1, 1]),
    "boxes are corner and size, read as corners": lambda b: torch.cat([b[:, :2], b[:, 2:] - b[:, :2]], 1),
    "boxes are centre and size, read as corners":
        lambda b: torch.cat([(b[:, :2] + b[:, 2:]) / 2, b[:, 2:] - b[:, :2]], 1),
    "x and y are exchanged": lambda b: b[:, [1, 0, 3, 2]],
}  # fmt: skip


def _together(parts: list[Statement]) -> Statement:
    """Statements of single pictures as one of the batch."""

    def rows(forms: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        return {name: torch.stack([form[name] for form in forms]) for name in forms[0]}

    return Statement(rows([p.right for p in parts]), rows([p.wrong for p in parts]))


def focal(logits: Tensor, truth: Tensor, alpha: float = 0.25, gamma: float = 2.0) -> Tensor:
    """Return the focal loss of every entry (Lin 2017, equation 5)."""
    p = logits.sigmoid()
    right = torch.where(truth > 0, p, 1 - p)
    surprise = -torch.where(truth > 0, F.logsigmoid(logits), F.logsigmoid(-logits))
    return torch.where(truth > 0, alpha, 1 - alpha) * (1 - right) ** gamma * surprise


def _classified(logits: Tensor, labels: Tensor) -> Statement:
    """(A, n) logits, (A,) class or -1 (background) or -2 (not scored)."""
    truth = F.one_hot(labels.clamp_min(0), logits.shape[1]) * (labels >= 0)[:, None]
    scored = (labels > -2)[:, None]
    plain = F.binary_cross_entropy_with_logits(logits, truth.float(), reduction="none")
    return Statement(
        {"focal loss": (focal(logits, truth) * scored).sum(), "binary cross-entropy": (plain * scored).sum()},
        {"background is not learnt": (focal(logits, truth) * (labels >= 0)[:, None]).sum(),
         "objects are not learnt": (focal(logits, truth) * (labels == -1)[:, None]).sum(),
         "classes one off": (focal(logits, truth.roll(1, 1)) * scored).sum()},
    )  # fmt: skip


def fcos(
    model: detectors.Fcos, predicted: dict[str, Tensor], anchors: Tensor, levels: list[int], target: dict
) -> tuple[dict[str, Statement], Assigned]:
    """A location is assigned to the smallest object that contains it, if it is near the object's centre and the object has the size
    of its level."""
    centre, stride = (anchors[:, :2] + anchors[:, 2:]) / 2, anchors[:, 2] - anchors[:, 0]
    low, high = stride * 4, stride * 8
    low[: levels[0]], high[len(anchors) - levels[-1] :] = 0, float("inf")
    side = target["boxes"]
    # (A, k, 4): l, t, r, b
    reach = torch.cat([centre[:, None] - side[None, :, :2], side[None, :, 2:] - centre[:, None]], 2)
    middle = (side[:, :2] + side[:, 2:]) / 2
    near = (centre[:, None] - middle[None]).abs().amax(2) < RADIUS * stride[:, None]
    longest = reach.amax(2)
    fits = near & (reach.amin(2) > 0) & (longest > low[:, None]) & (longest < high[:, None])
    area = (side[:, 2] - side[:, 0]) * (side[:, 3] - side[:, 1])
    cost = torch.where(fits, area[None].expand(fits.shape), torch.inf)
    mine = cost.amin(1).isfinite() if len(side) else torch.zeros(len(anchors), dtype=torch.bool, device=anchors.device)
    whose = cost[mine].argmin(1) if len(side) else mine[:0].long()
    labels = torch.full((len(anchors),), -1, device=anchors.device)
    labels[mine] = target["labels"][whose]
    due, x, y = side[whose], *centre[mine].unbind(1)
    left, top, right, bottom = (predicted["bbox_regression"][mine] * stride[mine, None]).unbind(1)
    boxed = torch.stack([x - left, y - top, x + right, y + bottom], 1)
    sides = torch.stack([x - due[:, 0], y - due[:, 1], due[:, 2] - x, due[:, 3] - y], 1)
    across, down = sides[:, [0, 2]], sides[:, [1, 3]]
    middling = (across.amin(1) / across.amax(1) * down.amin(1) / down.amax(1)).sqrt()
    how_near = predicted["bbox_ctrness"][mine].flatten()
    statements = {
        "classification": _classified(predicted["cls_logits"], labels),
        "bbox_regression": _overlapping(boxed, due),
        "bbox_ctrness": Statement(
            {"centerness": F.binary_cross_entropy_with_logits(how_near, middling, reduction="sum")},
            {"centerness without its root": F.binary_cross_entropy_with_logits(how_near, middling**2, reduction="sum"),
             "every location is taken for a centre": F.binary_cross_entropy_with_logits(how_near, torch.ones_like(middling), reduction="sum")},
        ),
    }  # fmt: skip
    return statements, Assigned(labels, sides / stride[mine, None])


def _overlapping(predicted: Tensor, due: Tensor) -> Statement:
    """Losses of boxes (k, 4) by their overlap; generalised (Rezatofighi 2019): less the share of the hull that neither covers."""
    size = lambda b: (b[:, 2] - b[:, 0]) * (b[:, 3] - b[:, 1])  # noqa: E731
    both = (
        (torch.minimum(predicted[:, 2:], due[:, 2:]) - torch.maximum(predicted[:, :2], due[:, :2])).clamp_min(0).prod(1)
    )
    hull = (
        (torch.maximum(predicted[:, 2:], due[:, 2:]) - torch.minimum(predicted[:, :2], due[:, :2])).clamp_min(0).prod(1)
    )
    union = size(predicted) + size(due) - both
    iou = both / (union + 1e-7)
    return Statement({"1 - GIoU": (1 - iou + (hull - union) / (hull + 1e-7)).sum(), "1 - IoU": (1 - iou).sum()})


def retinanet(
    model: detectors.Dense, predicted: dict[str, Tensor], anchors: Tensor, levels: list[int], target: dict
) -> tuple[dict[str, Statement], Assigned]:
    """An anchor is assigned to an object if their IoU is at least 0.5, or if no other anchor overlaps the object more; from 0.4 to
    0.5 it is not scored. Sums over a picture are divided by its assigned anchors."""
    side = target["boxes"]
    labels = torch.full((len(anchors),), -1, device=anchors.device)
    whose = labels.clamp_min(0)
    if len(side):
        size = lambda b: (b[:, 2] - b[:, 0]) * (b[:, 3] - b[:, 1])  # noqa: E731
        both = (
            (torch.minimum(side[:, None, 2:], anchors[:, 2:]) - torch.maximum(side[:, None, :2], anchors[:, :2]))
            .clamp_min(0)
            .prod(2)
        )
        iou = both / (size(side)[:, None] + size(anchors) - both)  # (k, A)
        best, whose = iou.max(0)
        claimed = (iou == iou.amax(1, keepdim=True)).any(0)
        labels = torch.where((best >= 0.5) | claimed, target["labels"][whose], torch.where(best >= 0.4, -2, -1))
    mine = labels >= 0
    n, due, own = mine.sum().clamp_min(1), side[whose[mine]], anchors[mine]
    wide, middle = (lambda b: b[:, 2:] - b[:, :2]), (lambda b: (b[:, :2] + b[:, 2:]) / 2)
    off = torch.cat([(middle(due) - middle(own)) / wide(own), (wide(due) / wide(own)).log()], 1)
    weights = off.new_tensor(model.net.head.regression_head.box_coder.weights)
    gap = predicted["bbox_regression"][mine] - off * weights
    classified = _classified(predicted["cls_logits"], labels)
    statements = {
        "classification": Statement(*({k: v / n for k, v in forms.items()} for forms in (classified.right, classified.wrong))),
        "bbox_regression": Statement({"absolute error of the offsets": gap.abs().sum() / n,
                                      "Huber's loss of the offsets": F.smooth_l1_loss(gap, torch.zeros_like(gap), reduction="sum") / n},
                                     {"offsets of another object": gap.roll(1, 0).abs().sum() / n}),
    }  # fmt: skip
    return statements, Assigned(labels, off * weights)


DETECT = formula.gate_of(
    detect, rows="V3",
    causes="boxes or labels are changed between the batch and the loss (rounded, another format, another class)\n"
    "another matching of locations and objects\na weight or a mean that the settings do not name",
)  # fmt: skip
