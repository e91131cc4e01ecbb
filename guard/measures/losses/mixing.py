"""Mixed targets (mixup, CutMix): compares their weights with those of the mixed inputs, and makes one loss of the two that have them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from trainworthy.core.base.doubles import to_double
from trainworthy.guard.hooks.addresses import address_of
from trainworthy.guard.measures.records import on_gradient

CALLS, ENOUGH, CLOSE_TO = 200, 12, 1e-3
LOOKS = 60  # outputs whose gradients are looked at


class Mixing:
    """For mixup and CutMix: counts the loss calls whose target weights agree with the weights of the mixed inputs, and those that do not."""

    def __init__(self) -> None:
        self.calls = self.right = self.exchanged = self.foreign = 0
        self.last: Term | None = None
        self.terms = self.outputs = 0

    def add(self, goal: Tensor, given: Tensor, batches: Any) -> None:
        """`goal`: soft targets (N, C); `given`: the model's input; `batches`: the tensors of the loader's last batches."""
        self.calls += 1
        if self.calls > CALLS or self.right + self.exchanged + self.foreign >= ENOUGH or not given.is_floating_point():
            return
        for leaves in reversed(batches):
            found = compare(goal.detach(), given.detach(), leaves)
            if found:
                setattr(self, found, getattr(self, found) + 1)
                return

    def output(self, out: Any, given: Tensor, batches: Any) -> None:
        """Note a model's logits: their gradient tells which soft targets a loss had, however it is written."""
        if self.outputs >= LOOKS or not isinstance(out, Tensor) or not out.requires_grad:
            return
        if out.dim() != 2 or not 2 < out.shape[1] <= 1000 or not len(batches):
            return
        inputs = [x for batch in batches for x in batch if x.shape == given.shape and x.is_floating_point()]
        if not inputs or any(address_of(x) == address_of(given) for x in inputs):  # nothing is mixed
            return
        self.outputs += 1
        last, kept = list(batches), out.detach()

        def differentiated(grad: Tensor) -> None:
            goal = recovered(kept, grad)
            if goal is not None:
                self.add(goal, given, last)

        on_gradient(out, differentiated)

    def logarithms(self, out: Tensor, given: Tensor, batches: Any) -> None:
        """Note the result of log_softmax: its gradient is the soft target with the sign reversed, however the loss is written."""
        last = list(batches)
        inputs = [x for batch in last for x in batch if x.shape == given.shape and x.is_floating_point()]
        if self.outputs >= LOOKS or not 2 < out.shape[1] <= 1000:
            return
        if any(address_of(x) == address_of(given) for x in inputs):
            return
        self.outputs += 1

        def differentiated(grad: Tensor) -> None:
            t = -grad.float()
            if bool((t >= 0).all()) and bool((t.sum(1) > 0).all()):
                t = t / t.sum(1, keepdim=True)
                floor = t.amin(1, keepdim=True)  # label smoothing
                t = (t - floor) / (1 - floor * t.shape[1])
                self.add(torch.where(t < 0.01, torch.zeros_like(t), t), given, last)

        on_gradient(out, differentiated)

    def term(self, logits: Tensor, target: Tensor, out: Any, given: Tensor, batches: Any) -> None:
        """Note a loss with class targets: two of them on one output, weighed by lam and 1 - lam, are a mixed target."""
        before, self.last = self.last, None
        self.terms += 1
        if self.terms > 2 * CALLS or not isinstance(out, Tensor) or out.dim():
            return
        if not out.requires_grad or logits.dim() != 2:
            return
        one = self.last = Term(address_of(logits), target.detach())
        other = before if before is not None and before.place == one.place else None

        def weighed(grad: Tensor, one: Term = one) -> None:
            one.weight = float(grad)
            first = one.partner
            if first is not None and first.weight is not None and one.weight + first.weight > 0:
                self.add(soft([first, one], logits.shape[1]), given, batches)

        one.partner = other
        if other is not None:
            other.partner = one
        on_gradient(out, weighed)


@dataclass
class Term:
    """One cross-entropy: where its logits are, its targets, its weight in the loss."""

    place: int
    target: Tensor
    weight: float | None = None
    partner: "Term | None" = None


def recovered(logits: Tensor, grad: Tensor) -> Tensor | None:
    """Return the targets t of a cross-entropy from its gradient s (p - t), without label smoothing. In each row all but two
    entries of t are the same: there the gradient is a straight line over p, with the slope s."""
    p, g = to_double(logits).softmax(1), to_double(grad)
    if p.shape[1] < 4 or not bool(g.any()) or float(g.sum(1).abs().max()) > 1e-3 * float(g.abs().max()):
        return None
    places = g.topk(p.shape[1] - 2, 1).indices
    x, y = p.gather(1, places).flatten(), g.gather(1, places).flatten()
    whole = len(x)
    for _ in range(4):  # a small share of a class that is thought likely is not among the two lowest gradients
        a = torch.stack([x, torch.ones_like(x)], 1)
        slope, start = torch.linalg.lstsq(a, y[:, None]).solution.flatten()
        off = (a @ torch.stack([slope, start]) - y).abs()
        near = off <= 3 * off.median() + 1e-6 * g.abs().max()
        x, y = x[near], y[near]
    if not slope > 0 or len(x) < 0.7 * whole or float(off[near].max()) > 1e-3 * float(g.abs().max()):
        return None
    floor = (-start / slope).clamp_min(0)
    t = ((p - g / slope - floor) / (1 - floor * p.shape[1])).float()
    t = torch.where(t < 0.01, torch.zeros_like(t), t)
    return t if float(((t > 0).sum(1) <= 2).float().mean()) > 0.9 else None


def soft(terms: list[Term], classes: int) -> Tensor:
    """Return the soft targets that several weighed class targets amount to."""
    total = sum(t.weight or 0.0 for t in terms)
    return sum(F.one_hot(t.target, classes).float() * ((t.weight or 0.0) / total) for t in terms)


def compare(goal: Tensor, given: Tensor, leaves: list[Tensor]) -> str:
    """Return `right`, `exchanged` or `foreign` (the second input's class is not in the target); empty if this is not
    the batch that was mixed."""
    n, classes = goal.shape
    inputs = next((x for x in leaves if x.is_floating_point() and x.shape == given.shape), None)
    labels = next((x for x in leaves if x.dtype == torch.int64 and x.shape == (n,)), None)
    if inputs is None or labels is None or int(labels.min()) < 0 or int(labels.max()) >= classes:
        return ""
    own = goal.gather(1, labels[:, None].to(goal.device))[:, 0]
    two = (goal > 0).sum(1) == 2
    rows = torch.nonzero(two & (own > 0.05) & (own < 0.95) & ((own - 0.5).abs() > 0.05)).flatten()[:8]
    if len(rows) < 3:
        return ""
    flat, mixed = inputs.flatten(1).float(), given.flatten(1).float()
    votes = []
    for i in rows.tolist():
        share = float(own[i])
        partner = next(((kind, j) for kind, a in (("right", share), ("exchanged", 1 - share))
                        if (j := other(flat, mixed[i], i, a)) is not None), None)  # fmt: skip
        if partner is None:
            return ""
        kind, j = partner
        second = float(goal[i, int(labels[j])])
        votes.append(kind if second > 0 else "foreign")
    if 2 * votes.count("foreign") > len(votes):  # two samples may have one class by chance
        return "foreign"
    return votes[0] if len(set(votes)) == 1 else ""


def other(inputs: Tensor, mixed: Tensor, i: int, share: float) -> int | None:
    """Return the row whose share of `1 - share` makes `mixed` out of row `i`."""
    rest = (mixed - share * inputs[i]) / (1 - share)
    difference = (inputs - rest).abs().amax(1)
    j = int(difference.argmin())
    scale = float(inputs.abs().max())
    return j if float(difference[j]) < CLOSE_TO * scale / min(share, 1 - share) and j != i else None


def weigh(row: dict, out: Any) -> None:
    """Note in a loss's row its weight in what is minimised, and its weighed value, when the gradient is known."""
    if not isinstance(out, Tensor) or not out.requires_grad or out.dim() > 1:
        return
    value = out.detach()

    def weighed(grad: Tensor) -> None:
        mean = float((grad * value).sum()) if grad.dim() else float(grad) * row["nll"]
        row["weight_of_loss"], row["weighed_nll"] = float(grad.sum()), mean

    on_gradient(out, weighed)


def pooled(rows: list[dict]) -> list[dict]:
    """Make one row of two losses on the same outputs with other targets: each alone is no lower for a model that has learnt, because
    the other target's share of the input is what it should ignore there."""
    groups: dict[tuple, list[dict]] = {}
    for i, r in enumerate(rows):
        groups.setdefault((r["step"], r["since"], r["scores"]) if "scores" in r else (i,), []).append(r)
    return [one for some in groups.values() for one in ([merged(some)] if is_mixed(some) else some)]


def is_mixed(rows: list[dict]) -> bool:
    """Return whether these losses on the same outputs have different targets, and their weights are known."""
    weights = [r.get("weight_of_loss", -1.0) for r in rows]
    return len({r.get("home") for r in rows}) > 1 and min(weights) >= 0 and sum(weights) > 0


def merged(rows: list[dict]) -> dict:
    """Return the losses of one output as one, by their weights."""
    total = sum(r["weight_of_loss"] for r in rows)
    right = sum(r["weight_of_loss"] * r["right"] / r["scored"] for r in rows) / total
    return rows[0] | {"nll": sum(r["weighed_nll"] for r in rows) / total, "right": right * rows[0]["scored"]}
