"""Checks of the targets and weights that a loss gets, against each other: weights of classes against their frequency, soft targets against
the labels of the same samples, masked tokens against the places that are scored.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import WeightedRandomSampler
from trainworthy.core.base.correlation import pearson
from trainworthy.core.base.verdict import Fault
from trainworthy.guard.hooks.trees import tensors

MANY = 500  # samples without any label, after which labels are not just rare
ROWS = 500  # soft targets that are compared with labels
DIVERSE = 8  # tokens at places whose targets are one number
EVEN = 1e-3  # difference of neighbours in a mask, less than 1 of 255


class Soft:
    """Soft targets of a training, next to the only entry of their batches that can be the class of the same samples."""

    def __init__(self) -> None:
        self.classes = 0
        self.rows: list[tuple[Tensor, Tensor, float]] = []
        """Class, most probable class of the soft target, its probability."""

    def note(self, target: Tensor, batch: Any) -> None:
        """Note the soft targets (N, C) of one call, if the batch has one entry of N classes that are as many as C."""
        if target.dim() != 2 or not 3 <= target.shape[1] <= 1000 or len(self.rows) >= 64:
            return
        n, classes = target.shape
        found = [x for x in tensors(batch) if x.dtype == torch.int64 and x.shape == (n,)]
        found = [x for x in found if n and int(x.min()) >= 0 and int(x.max()) < classes]
        if len(found) == 1 and self.classes in (0, classes):
            self.classes = classes
            likely = target.detach().float().max(1)
            self.rows.append((found[0].cpu(), likely.indices.cpu(), float(likely.values.mean())))


def contradiction(one: Soft) -> Fault | None:
    """Find soft targets that are confident, and have nothing to do with the classes of their samples."""
    if not one.rows:
        return None
    classes = one.classes
    label, likely = (torch.cat(x) for x in list(zip(*one.rows, strict=True))[:2])
    n, sure = len(label), sum(r[2] for r in one.rows) / len(one.rows)
    share = [torch.bincount(x, minlength=classes)[:classes].double() / n for x in (label, likely)]
    if n < ROWS or min(float((s > 0).double().mean()) for s in share) < 0.7:
        return None
    chance, agree = float((share[0] * share[1]).sum()), float((label == likely).double().mean())
    if sure < chance + 0.25 or agree > chance + 3 * (chance * (1 - chance) / n) ** 0.5:
        return None
    return (
        f"the most probable class of the soft targets is the class in the batch for {agree:.1%} of {n} samples ({chance:.1%} by chance)",
        "the soft targets are those of other samples: they were computed in another order (shuffle=True), and are read by index",
    )


def turned(times: dict[str, int], rows: list[dict]) -> Fault | None:
    """Find a binary loss that always gets the target in place of the prediction. `times`: calls in which only the target had a gradient."""
    used = {r["loss"] for r in rows}
    name, count = max(times.items(), key=lambda one: one[1], default=("", 0))
    if count < 3 or name in used:
        return None
    return (
        f"in all {count} calls of {name} the target has a gradient, and the input has none",
        f"the two are exchanged: {name}(prediction, target)",
    )


def proportional(weights: Any, counts: Any, *, within: float) -> bool:
    """Return whether weights are the counts times one factor, where the largest count is at least twice the smallest; of three or more,
    whether they are their roots or their squares."""
    w, n = np.asarray(weights, float), np.asarray(counts, float)
    if len(w) < 2 or (w <= 0).any() or (n <= 0).any() or n.max() < 2 * n.min():
        return False
    powers = (0.5, 1.0, 2.0) if len(w) > 2 else (1.0,)
    return any(np.ptp(np.log(w) - p * np.log(n)) < within * p * np.ptp(np.log(n)) for p in powers)


def class_weights(rows: list[dict]) -> Fault | None:
    """Find class weights of a loss that are the classes' own frequencies."""
    rows = [r for r in rows if r.get("weight") and r.get("counts")]
    if not rows:
        return None
    weight = np.array(rows[0]["weight"])
    counts = np.sum([r["counts"] for r in rows if len(r["counts"]) == rows[0]["classes"]], axis=0)
    known = counts >= 20
    if known.sum() < 2 or not proportional(weight[known], counts[known], within=0.35):
        return of_each_batch(rows)
    return (
        f"the loss weights classes by {weight[known].min():.3g} to {weight[known].max():.3g}; they have {counts[known].min():,} to "
        f"{counts[known].max():,} targets: the rarer, the lower",
        "the weights are frequencies (or their power) and not their inverse: the frequent classes count twice",
    )


def of_each_batch(rows: list[dict]) -> Fault | None:
    """Find weights that are made anew from each batch, and are the frequencies of its own classes."""
    found = []
    for r in rows:
        weight, counts = np.array(r["weight"]), np.array(r["counts"])
        known = counts > 0
        if len(counts) == len(weight) and known.sum() > 1 and counts.max() >= 2 * counts[known].min():
            found.append(proportional(weight[known], counts[known], within=0.05))
    if len(found) < 8 or sum(found) < 0.9 * len(found) or len({tuple(r["weight"]) for r in rows}) < 2:
        return None
    return (
        f"in {sum(found)} of {len(found)} batches the loss weights classes by their own frequency there: the rarer, the lower",
        "the weights are frequencies (or their power) and not their inverse: the frequent classes count twice",
    )


def upside_down(rows: list[dict]) -> Fault | None:
    """Find weights of positives that are the lower, the rarer the positives are."""
    if not rows:
        return None
    weight, share = np.array(rows[0]["pos_weight"]), np.mean([r["positive"] for r in rows], axis=0).clip(1e-3, 1 - 1e-3)
    odds = np.log(share / (1 - share))
    if len(rows) < 4 or (weight <= 0).any():
        return None
    varied = len(weight) >= 3 and np.log(weight).std() > 0.2 and odds.std() > 0.2
    same = pearson(torch.from_numpy(np.log(weight)), torch.from_numpy(odds)) if varied else 0.0
    equal = float(np.abs(np.log(weight) - odds).mean()) < 0.3 and float(np.abs(odds).mean()) > 0.7
    if same < 0.9 and not equal:
        return None
    return (
        f"pos_weight is {weight.min():.2g} to {weight.max():.2g} where {share.min():.0%} to {share.max():.0%} of the targets are "
        "positive: the rarer, the lower",
        "the ratio is inverted: pos_weight = negatives / positives",
    )


def sampler_weights(passes: list) -> Fault | None:
    """Find a sampler whose weights are those of classes, or the frequencies of what it weighs."""
    for sampler, loader in {getattr(p.loader, "sampler", None): p.loader for p in passes}.items():
        if not isinstance(sampler, WeightedRandomSampler):
            continue
        if hasattr(loader.dataset, "__len__") and len(sampler.weights) < 0.5 * len(loader.dataset):
            return (
                f"the sampler has {len(sampler.weights):,} weights for {len(loader.dataset):,} samples: the other samples are never drawn",
                "it has one weight for each class and not for each sample: weights[labels] is meant",
            )
        if len(sampler.weights) < 100:
            continue
        values, counts = sampler.weights.double().unique(return_counts=True)
        if 2 <= len(values) <= 200 and proportional(values, counts, within=0.1):
            return (
                f"the sampler's weights are {float(values[0]):.3g} to {float(values[-1]):.3g} for groups of {int(counts.min()):,} to "
                f"{int(counts.max()):,} samples, in proportion to their size: the rarer, the less often drawn",
                "the weights are frequencies and not their inverse",
            )
    return None


def masking(ids: Tensor | None, flat: Tensor, scored: Tensor) -> dict[str, Any] | None:
    """Return how often the commonest input at scored places, which is never a target, is found there and at places that are not scored."""
    if ids is None or ids.numel() != flat.numel() or not 0.01 < float(scored.float().mean()) < 0.5:
        return None
    ids = ids.flatten()
    token = int(ids[scored].mode().values)
    if bool((flat[scored] == token).any()):
        return None
    return {
        "token": token,
        "at": [int((ids[m] == token).sum()) for m in (scored, ~scored)],
        "of": [int(scored.sum()), int((~scored).sum())],
    }


def masked_elsewhere(rows: list[dict]) -> Fault | None:
    """Find tokens that are masked although they are not to be predicted."""
    rows = [r["masking"] for r in rows if r.get("masking")]
    if len(rows) < 3 or len({r["token"] for r in rows}) > 1:
        return None
    (hit, other), (n, rest) = (np.sum([r[k] for r in rows], axis=0) for k in ("at", "of"))
    if hit < 50 or hit < 0.5 * n or other / rest < 0.25 * hit / n:
        return None
    return (
        f"token {rows[0]['token']}, which is never a target, is at {hit / n:.0%} of the scored places and at {other / rest:.0%} of the others",
        "more tokens are masked than are predicted: the mask is not restricted to the chosen positions",
    )


def unmasked(ids: Tensor | None, flat: Tensor, scored: Tensor) -> dict[str, Any] | None:
    """Return how many scored targets are not the input's own token at their place (nor one number that stands for all that is not masked), and
    which token the input mostly has there."""
    if ids is None or ids.numel() != flat.numel() or float(scored.float().mean()) < 0.5:
        return None
    ids = ids.flatten()
    differ, n = scored & (ids != flat), int(scored.sum())
    common = int(flat[scored].mode().values)
    rest = scored & (flat == common)
    if constant := int(rest.sum()) > 0.5 * n and len(ids[rest].unique()) >= DIVERSE:
        differ = scored & ~rest
    if not 0.03 < (share := float(differ.sum()) / n) < 0.4:
        return None
    token = int(ids[differ].mode().values)
    if bool((flat[scored] == token).any()):
        return None
    found = {"token": token, "share": share, "differ": int(differ.sum()), "held": int((ids[differ] == token).sum())}
    return found | ({"constant": common} if constant else {})


def unmasked_scored(rows: list[dict]) -> Fault | None:
    """Find a masked language model that is scored at places that are not masked, too. In a discrete diffusion, which scores all places, the share
    of masked ones changes from batch to batch; the decoder of a translation is given its targets."""
    rows = [r["unmasked"] for r in rows if r.get("unmasked") and not r.get("forced")]
    if len(rows) < 3 or len({r["token"] for r in rows}) > 1:
        return None
    shares = np.array([r["share"] for r in rows])
    differ, held = (sum(r[k] for r in rows) for k in ("differ", "held"))
    if differ < 50 or held < 0.6 * differ or shares.std() > 0.35 * shares.mean():
        return None
    own = str(rows[0].get("constant", "the input's own token"))
    return (
        f"at {1 - shares.mean():.0%} of the scored places the target is {own}; at most others the input has token "
        f"{rows[0]['token']}, which is never a target",
        "places that were not masked are scored, too: their labels are the ignored index (-100)",
    )


def one_for_all(target: Tensor) -> int | None:
    """Return a number of a target of several entries that all samples of a batch share; None where they do not. Entries in order (the
    positive first, then the negatives) may be meant."""
    if target.dim() < 2 or len(target) < 4:
        return None
    flat = target.flatten(1)
    steps = flat[0].diff()
    if not bool((steps > 0).any() and (steps < 0).any()) or not bool((flat == flat[0]).all()):
        return None
    return hash(flat[0].cpu().float().numpy().tobytes())


def shared_target(rows: list[dict]) -> Fault | None:
    """Find one target that all samples of all batches have."""
    found, count = {r.get("shared") for r in rows}, sum(r["rows"] for r in rows)
    cause = "one tensor is filled anew for each sample and stored without a copy, or one sample's target is repeated for all"
    if count >= MANY and all(r.get("empty") for r in rows):
        return (
            f"of {count:,} samples with several labels each, none has one",
            f"{cause}; or the labels are lost on the way",
        )
    if len(rows) < 4 or count < 64 or len(found) > 1 or None in found:
        return None
    return (
        f"the targets of all {count:,} samples in {len(rows)} batches are the same, zeros and ones in no regular order",
        cause,
    )


def tiny_targets(rows: list[dict]) -> Fault | None:
    """Find binary targets whose ones were scaled down."""
    rows = [r for r in rows if "levels" in r]
    high = max((r["high"] for r in rows), default=0.0)
    if len(rows) < 4 or not 0 < high < 0.1 or any(r["low"] or r["levels"] > 2 for r in rows):
        return None
    return f"binary targets are 0 and {high:.3g}, never 1", "the mask or label was scaled twice (by 255, in two places)"


def one_of_two(rows: list[dict]) -> Fault | None:
    """Find a loss of two classes that ignores one of them: the other one is all that can be learnt."""
    rows = [r for r in rows if "one_left" in r]
    lost, n = sum(r["n"] - r["scored"] for r in rows), sum(r["n"] for r in rows)
    if len(rows) < 3 or n < 32 or lost < 0.1 * n:
        return None
    return (
        f"a loss of two classes ignores class {rows[0]['one_left']}: {lost:,} of its {n:,} targets, and all others are the same class",
        "ignore_index is one of the classes: the loss of another head (padded tokens) is used for this one, too",
    )


def plateaus(target: Tensor) -> list[int] | None:
    """Return, for masks (N, H, W) or (N, 1, H, W): pixels above 0, those of them inside an area of one value below 1, and how many such values
    there are. An edge that resizing has softened is no such area."""
    mask = target.squeeze(1) if target.dim() == 4 and target.shape[1] == 1 else target
    if mask.dim() != 3 or min(mask.shape[1:]) < 8:
        return None
    mask = mask[:8].detach().float()
    inside = (mask[:, 1:-1, 1:-1] > 0) & (mask[:, 1:-1, 1:-1] < 1)
    for shifted in (mask[:, :-2, 1:-1], mask[:, 2:, 1:-1], mask[:, 1:-1, :-2], mask[:, 1:-1, 2:]):
        inside &= (shifted - mask[:, 1:-1, 1:-1]).abs() < EVEN
    values, counts = mask[:, 1:-1, 1:-1][inside].div(EVEN).round().unique(return_counts=True)
    return [int((mask > 0).sum()), int(inside.sum()), int((counts >= 4).sum())] if len(values) else None


def numbered_masks(rows: list[dict]) -> Fault | None:
    """Find masks of a binary loss that hold numbers of objects or of classes, scaled to 0..1."""
    found = [r["plateaus"] for r in rows if r.get("plateaus")]
    if len(found) < 4 or len(found) < 0.5 * len(rows):
        return None
    shown, inside = (sum(f[i] for f in found) for i in (0, 1))
    levels = sorted(f[2] for f in found)[len(found) // 2]
    if inside < 0.15 * shown or levels < 3:
        return None
    return (
        f"binary masks hold areas of {levels} values between 0 and 1 in a batch (median): {inside / shown:.0%} of the pixels above 0 are inside one",
        "the mask holds numbers of objects or of classes that were scaled to 0..1: compare it (mask > 0, mask == k) in place of scaling it",
    )


def padded(ids: Tensor | None, flat: Tensor, ignore: int) -> list[int] | None:
    """Return, for tokens (B, T) whose shorter rows are padded at their ends: scored targets at padding, all scored targets, the class of the
    former, and how often that class is a target elsewhere. None where padding has no class of its own. Padding is a token that is nowhere else."""
    ends = padding(ids, flat)
    if ids is None or ends is None:
        return None
    target = flat.view(ids.shape)
    classes = target[ends].unique()
    if len(classes) != 1 or int(classes) == ignore:
        return None
    here = target == classes
    return [int(ends.sum()), int((target != ignore).sum()), int(classes), int((here & ~ends).sum())]


def padding(ids: Tensor | None, flat: Tensor) -> Tensor | None:
    """Return where the shorter rows of tokens (B, T) are padded at their ends, (B, T); None if none is, or if this cannot be told."""
    if ids is None or ids.numel() != flat.numel() or min(ids.shape) < 2:
        return None
    token = ids[:, -1].mode().values
    ends = (ids == token).flip(1).cumprod(1).flip(1).bool()
    whole = int((~ends[:, -1]).sum())
    return ends if whole and not bool((ids == token).ne(ends).any()) else None


def other_side(ids: Tensor | None, flat: Tensor, ignore: int) -> list[int] | None:
    """Return, of tokens (B, T) that are padded at their ends: rows that are padded, and those of them whose targets begin with at least as many
    ignored places and have scored ones at the padding."""
    ends = padding(ids, flat)
    if ids is None or ends is None:
        return None
    left_out = flat.view(ids.shape) == ignore
    pads, first = ends.sum(1), left_out.cumprod(1).sum(1)
    rows = pads > 0
    return [int(rows.sum()), int((rows & (first >= pads) & (ends & ~left_out).any(1)).sum())]


def padded_apart(rows: list[dict]) -> Fault | None:
    """Find inputs that are padded at their ends and targets that are padded at their beginnings."""
    found = [r["other_side"] for r in rows if r.get("other_side")]
    count, wrong = (sum(f[i] for f in found) for i in (0, 1))
    if len(found) < 4 or len(found) < 0.5 * len(rows) or wrong < 0.9 * count:
        return None
    return (
        f"in {wrong:,} of {count:,} rows that are padded at their ends, the targets begin with as many ignored places, and are scored at the padding",
        "inputs are padded on the right and labels on the left: each label is next to another token; pad both on the same side",
    )


def padding_scored(rows: list[dict]) -> Fault | None:
    """Find a class that stands for padding among the targets, too, and counts there."""
    found = [r["padded"] for r in rows if r.get("padded") and not r.get("shift")]
    if len(found) < 4 or len(found) < 0.5 * len(rows) or len({f[2] for f in found}) > 1:
        return None
    count, scored, elsewhere = (sum(f[i] for f in found) for i in (0, 1, 3))
    if count < 0.05 * scored or elsewhere < 0.05 * (scored - count):
        return None
    return (
        f"{count:,} of {scored:,} scored targets are at the padding of shorter rows, all with class {found[0][2]}, which is the target of "
        f"{elsewhere:,} real places, too",
        "targets are padded with a real class: pad them with the loss's ignore_index (-100)",
    )
