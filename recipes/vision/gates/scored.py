"""The gate on the pixels and classes that loss and metric of a segmentation score (V5): a net that knows the answer is evaluated.

It needs data of type masks.Windows, samples with `image` and `mask`, and logits (B, n, H, W).
"""

import copy
import math
from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from trainworthy.core.base.doubles import to_double
from trainworthy.core.base.verdict import Finding, Skip
from trainworthy.core.gates import gate
from trainworthy.core.gates.gate import GateContext, fetch, pick
from trainworthy.core.loop.run import Run
from trainworthy.core.recipe.stage import Data, Stage, View
from trainworthy.recipes.vision.data import masks
from trainworthy.recipes.vision.data.masks import IGNORE
from trainworthy.recipes.vision.evaluation import segmentation
from trainworthy.recipes.vision.gates import answers
from trainworthy.recipes.vision.gates.joint_transforms import outputs

SAMPLES, WINDOWS = 16, 200
# Of the truth at the net's size, scored in stored pixels: least loss of IoU at its outlines that is asked for, and most.
OUTLINES, MISPLACED = 0.005, 0.1
SHIFT = 6  # pixels by which a prediction is moved: it is wrong along one side of every object


def whole(data: Data) -> list[int]:
    """Return as many pictures as `WINDOWS` windows cover, at least one."""
    rows, chosen = Counter(place[0] for place in data.places), []
    for row, windows in rows.items():
        if not chosen or windows + sum(rows[r] for r in chosen) <= WINDOWS:
            chosen.append(row)
    return chosen


class FixedLogits(nn.Module):
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
        "a reported number is not what its name says (precision for recall)",
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
    net = FixedLogits(0.1 * logits)
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
    chosen, counts = whole(data), torch.zeros(n, n, dtype=torch.long)
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
