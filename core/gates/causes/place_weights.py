"""Which places of an output (pixels, tokens, samples) a loss weighs otherwise than its formula. `formula` asks this when no known
mistake fits.

For every loss that is a function of a place's cross-entropy, the gradient of a place's scores is that of the cross-entropy times a
weight. The weights say what was clamped, left out, turned round or weighted. They need no copy of the recipe's loss.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from trainworthy.core.base.correlation import spearman
from trainworthy.core.base.modes import in_mode

MOST = 30_000_000  # scores that are compared; larger outputs are not
DEAD = 1e-8  # of the largest weight: a place with less gets no gradient
TURNED = 1e-3  # of the largest weight, below 0: a place is pushed away from its class
MOSTLY, HARDLY = 0.5, 0.05  # share of a class's places without a gradient: this class is left out; this one is not
FEWEST = 4  # places of a class that say something about the class
ORDERED = 0.95  # rank correlation of weights with losses
UNSURE, ASCENT = 0.5, 1e-3
"""Probability of the own class below which a place must be pulled to it; share of the largest gradient that counts as one."""
BY_CLASS = "classes are weighted"  # beginning of the words that say so


def named(model: nn.Module, total: Callable[[], Tensor], due: Callable[[], Tensor], exact: float) -> str:
    """Return which places `total` weighs otherwise than `due`, or "" where the weights show no pattern. Both compute one scalar from
    one call of the model."""
    found, right = slopes(model, total), slopes(model, due)
    if found is None or right is None or found.shape != right.shape or found.numel() > MOST:
        return ""
    classes = _axis_of_classes(right)
    if classes is None:
        return ""
    sample = torch.arange(len(right)).view(-1, *[1] * (right.ndim - 2)).expand(right.movedim(classes, -1).shape[:-1])
    found, right = (x.movedim(classes, -1).flatten(0, -2) for x in (found, right))  # (places, classes) both
    size = right.square().sum(1)
    significant = size > 1e-12 * size.max()
    found = found[significant]
    right = right[significant]
    size = size[significant]
    sample = sample.flatten()[significant.cpu()]
    weight = (found * right).sum(1) / size
    error = (found - weight[:, None] * right).norm(dim=1)
    if (error > 10 * exact * (found.norm(dim=1).max() + size.sqrt())).any():
        return ""  # not a function of each place's cross-entropy
    loss, own = -torch.log1p(right.amin(1).clamp(-1 + 1e-7, 0)), right.argmin(1)
    return _pattern(weight.cpu(), loss.cpu(), own.cpu(), sample)


def left_out(model: nn.Module, total: Callable[[], Tensor], of: float, part: float) -> str:
    """Return that places (pixels, tokens) have the weight 0 in a loss of equal outputs, if this explains why it is only a `part` of what is
    due. `of`: the number that the loss is divided by."""
    slope = slopes(model, total)
    if slope is None or slope.ndim < 3 or (classes := _axis_of_classes(slope)) is None:
        return ""
    size = slope.abs().amax(classes)
    live = int((size > DEAD * size.max()).sum())
    if not 0 < live < of or abs(live / of - part) > 0.1 * part:
        return ""
    return (f"{1 - live / of:.0%} of the places that the loss is divided by get no gradient, although all outputs are equal: their weight is "
            "0, whatever is predicted there")  # fmt: skip


def _pattern(weight: Tensor, loss: Tensor, own: Tensor, sample: Tensor) -> str:
    """Weights, cross-entropies, classes and samples of places, (P,) each."""
    dead = weight.abs() < DEAD * weight.abs().max()
    if dead.all():
        return ""
    turned = weight < -TURNED * weight.abs().max()
    if turned.any():
        n = int(turned.sum())
        return f"{n} of {len(weight)} places are pushed away from their own class"
    if dead.any():
        share, lost, kept = dead.double().mean().item(), loss[dead], loss[~dead]
        if lost.min() >= kept.max():
            return (
                f"the loss is clamped: the {share:.0%} of places whose loss is above {kept.max():.3g} get no gradient"
            )
        if lost.max() <= kept.min():
            return f"the {share:.0%} of places whose loss is below {kept.min():.3g} get no gradient"
        without = {
            c: dead[own == c].double().mean().item() for c in own.unique().tolist() if (own == c).sum() >= FEWEST
        }
        out = [c for c, s in without.items() if s >= MOSTLY]
        if out and all(s <= HARDLY for c, s in without.items() if c not in out) and len(out) < len(without):
            names = ", ".join(map(str, out[:5]))
            return (
                f"class {names} gets no gradient at {min(without[c] for c in out):.0%} of its places: its weight is 0"
            )
        return f"{share:.0%} of places get no gradient"
    if means := _constant_within(weight, own):
        low, high = min(means, key=lambda c: means[c]), max(means, key=lambda c: means[c])
        return f"{BY_CLASS}: class {low} by {means[low]:.3g}, class {high} by {means[high]:.3g}"
    if len(sample.unique()) < len(sample) and (means := _constant_within(weight, sample)):
        return f"samples are weighted, by {min(means.values()):.3g} to {max(means.values()):.3g}"
    if weight.max() - weight.min() > 0.01 * weight.max():
        with_loss = spearman(weight, loss)
        if abs(with_loss) > ORDERED:
            more = "more" if with_loss > 0 else "less"
            return f"places weigh {more}, the higher their loss: {weight.min():.3g} to {weight.max():.3g} times the formula's weight"
    return ""


def _constant_within(weight: Tensor, group: Tensor) -> dict[int, float]:
    """Mean weight of each group, where weights differ between groups and not within one."""
    of = {g: weight[group == g] for g in group.unique().tolist()}
    of = {g: w for g, w in of.items() if len(w) >= FEWEST}
    means = {g: w.mean().item() for g, w in of.items()}
    if len(of) < 2 or max(means.values()) - min(means.values()) <= 0.01 * weight.max():
        return {}
    return means if all((w - w.mean()).abs().max() <= 0.01 * weight.max() for w in of.values()) else {}


def _axis_of_classes(slope: Tensor) -> int | None:
    """The axis along which a cross-entropy's gradient adds up to 0."""
    if slope.ndim < 2:
        return None
    sums = {d: slope.sum(d).abs().max().item() for d in range(1, slope.ndim)}
    best = min(sums, key=lambda d: sums[d])
    return best if sums[best] <= 1e-4 * slope.abs().max().item() else None


def astray(
    slope: Tensor, scores: Tensor, target: Tensor, scored: Tensor, named: tuple[str, str], pattern: str = ""
) -> str:
    """Return what is wrong if a loss of another form does not pull the places that it scores to their own classes; else "".

    Args:
        slope: its gradient with respect to `scores`, (..., classes) both; `target` (...): classes, of unscored places any valid one.
        named: plural of the places that are scored, and of the others.
        pattern: what `named()` found; it is told where less sure places get no gradient."""
    most, size = slope.abs().max(), slope.abs().amax(-1)
    p, rises = (x.gather(-1, target[..., None])[..., 0] for x in (scores.softmax(-1), slope))
    if (size[~scored] > ASCENT * most).any():
        return f"{named[1]} change the loss"
    if n := int((scored & (p < UNSURE) & (rises > ASCENT * most)).sum()):
        return f"{n} {named[0]} are pushed away from their own class"
    dead, pulled = scored & (size == 0), scored & (size > 0)
    # Sure places may get none, if hard ones alone are learnt
    if (dead & (p < UNSURE)).any() and p[dead].mean() < p[pulled].mean():
        return pattern or f"{dead.sum() / scored.sum():.0%} of the {named[0]}, the less sure ones, get no gradient"
    return ""


def slopes(model: nn.Module, compute: Callable[[], Tensor]) -> Tensor | None:
    """Return the gradient of a scalar with respect to the scores that the model returns; None if it is called more than once or returns
    something else."""
    seen: list[Tensor] = []

    def keep(_module: nn.Module, _args: tuple, out: Any) -> Any:
        scores = out if isinstance(out, Tensor) else getattr(out, "logits", None)
        if not isinstance(scores, Tensor) or not scores.is_floating_point():
            return out
        seen.append(scores.detach().requires_grad_())
        if isinstance(out, Tensor):
            return seen[-1]
        out.logits = seen[-1]
        return out

    with model.register_forward_hook(keep), torch.enable_grad(), in_mode(model, training=False):
        total = compute()
        if len(seen) != 1 or not total.requires_grad:
            return None
        slope = torch.autograd.grad(total, seen[0], allow_unused=True)[0]
    return None if slope is None else slope.detach().float()
