"""Finds why the gradient in the optimiser is not the loss's own.

Each candidate is the gradient that one known mistake would produce. The gate names the candidate that equals the
observed gradient, with its error, or reports that none fits.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from trainworthy.core.loop.optim import exact

SAME = 1e-2  # relative; above another processor's rounding, below the effect of new dropout draws
MOST = 50_000_000  # gradient entries; larger models get no copies
STRIDE, ENTRIES = 7, 1_000_000  # kept of a gradient until the next step: a seventh, or about so many entries

UNEXPLAINED = "no known mistake explains it"
Vector = list[Tensor]


@dataclass
class Experiment:
    """One candidate, compared with the gradient in the optimiser."""

    cause: str
    equals: str
    difference: float
    """Relative difference."""


@dataclass
class Candidates:
    """Gradients from which the candidates are made."""

    got: Vector
    own: Vector
    """Gradient of the loss on the step's batch."""
    before: Tensor | None
    """Entries (`sample`) of the gradient that the optimiser got at the step before."""
    stale: Vector | None
    """Gradient of the loss at the step before."""
    parts: list[Vector] = field(default_factory=list)
    """Contribution of each micro-batch to `own`."""
    local: Vector | None = None
    """This rank's contribution to `own`, as one process alone would compute it."""
    rolled: Callable[[], Vector | None] = lambda: None
    """`own` with each sample's target replaced by its neighbour's."""


def experiments(c: Candidates) -> list[Experiment]:
    """Compare every available candidate; the best fit comes first."""
    found: list[Experiment] = []

    def compare(
        equals: str, cause: str, candidate: Vector | None, *, clipped: bool = False, got: Vector = c.got
    ) -> None:
        """`clipped`: clipping may have changed the length, so compare the direction."""
        if candidate is not None:
            difference = _difference(_unit(got), _unit(candidate)) if clipped else _difference(got, candidate)
            found.append(Experiment(cause, equals, difference))

    n = len(c.parts)
    if c.before is not None and (some := sample(c.got)).any():
        added = "zero_grad() is missing: the gradients of earlier steps are added"
        both = sample(c.own) + c.before.to(some)
        compare("the loss's own plus what it got at the step before", added, [both], clipped=True, got=[some])
    late = "step() comes before backward(): the optimiser is a step behind"
    compare("that of the batch before", late, c.stale, clipped=True)
    for i, part in enumerate(c.parts):
        lost = f"{n - 1} of {n} micro-batches are lost: zero_grad() between them, or a loop that reads one batch"
        compare(f"that of micro-batch {i + 1} of {n} alone", lost, part)
        compare(f"that of micro-batch {i + 1} of {n} alone, as a mean of its own", lost, _scaled(part, n))
    bare = "gradients are not exchanged between processes (the bare module is called, not the wrapped one)"
    compare("this process's own", bare, c.local)
    scale = multiple(c.got, c.own)
    if scale is not None:
        each = n > 1 and abs(scale - n) < SAME * n
        why = f"each of {n} micro-batches counts as a whole step: divide its loss by {n}"
        scaled = "the loss is scaled in the loop: a sum instead of a mean, a second division, a weight, a scaler"
        found.append(Experiment(why if each else scaled, f"{scale:.4g} times the loss's own", 0.0))
    if min((e.difference for e in found), default=1.0) > SAME:
        compare("that of the same batch with each target shifted to the next sample",
                "targets and inputs are shifted against each other", c.rolled())  # fmt: skip
    return sorted(found, key=lambda e: e.difference)


def diagnosed(found: list[Experiment]) -> str:
    """Return the cause that fits, or that none does; empty if nothing was compared."""
    if not found:
        return ""
    best = found[0]
    if best.difference <= SAME:
        return (
            f"{best.cause} (the optimiser's gradient equals {best.equals}; relative difference {best.difference:.1e})"
        )
    return (f"{UNEXPLAINED}: of {len(found)} the nearest is {best.equals}, with a difference of {best.difference:.0%}; "
            "look for what changes the gradient between backward() and step()")  # fmt: skip


def ratio(got: float, due: float, factors: dict[str, float]) -> str:
    """Return the cause whose factor explains why `got` is a multiple of the expected value `due`; else "". `factors`:
    {cause: the ratio got / due that it would give}."""
    if not due or got == due:
        return ""
    near = {
        cause: abs(got / due / factor - 1) for cause, factor in factors.items() if factor and abs(factor - 1) > SAME
    }
    cause = min(near, key=near.get, default="")
    return (
        f"{cause} (off by a factor of {got / due:.4g}, as that would make it)" if cause and near[cause] <= 1e-3 else ""
    )


def against(got: Vector, own: Vector, scale: float, limit: float) -> tuple[dict[str, float], bool]:
    """Return (cosine and norms of the optimiser's gradient, divided by `scale`, and of the loss's own, whether these differ). The former may
    be clipped to the norm `limit`."""
    dot = sum((exact(g) * exact(f)).sum() for g, f in zip(got, own, strict=True)).item()
    norm, want = (sum(exact(g).square().sum() for g in of).sqrt().item() for of in (got, own))
    found = {"cosine": dot / max(norm * want, 1e-30), "norm": norm / scale, "own_norm": want}
    clip = min(1.0, limit / max(want, 1e-30))
    odd = abs(found["norm"] - want * clip) > 0.01 * want * clip and abs(found["norm"] - want) > 0.01 * want
    return found, odd or found["cosine"] < 0.99


def small(vector: Vector) -> bool:
    """Return whether the vector is small enough to keep copies."""
    return sum(t.numel() for t in vector) <= MOST


def sample(vector: Vector) -> Tensor:
    """Return evenly spaced entries of a gradient, (n,): enough to compare directions, and little to keep until the next step."""
    stride = max(STRIDE, sum(t.numel() for t in vector) // ENTRIES)
    return torch.cat([t.flatten()[::stride] for t in vector])


def _difference(a: Vector, b: Vector) -> float:
    gap = sum((exact(x) - exact(y)).square().sum() for x, y in zip(a, b, strict=True)).sqrt()
    size = max(sum(exact(x).square().sum() for x in v).sqrt() for v in (a, b))
    return (gap / size).item() if size > 0 else 0.0


def multiple(a: Vector, b: Vector) -> float | None:
    """Return the factor other than 1 by which `a` is a multiple of `b`, if any."""
    size = sum(exact(y).square().sum() for y in b)
    if not size > 0:
        return None
    found = (sum((exact(x) * exact(y)).sum() for x, y in zip(a, b, strict=True)) / size).item()
    close = found > 0 and _difference(a, _scaled(b, found)) <= SAME
    return found if close and abs(found - 1) > SAME else None


def _unit(a: Vector) -> Vector:
    size = sum(exact(x).square().sum() for x in a).sqrt().clamp_min(1e-30)
    return [x / size for x in a]


def _scaled(a: Vector, factor: float) -> Vector:
    return [x * factor for x in a]


def rolled(batch: dict, targets: list[str]) -> dict | None:
    """Return the batch with each sample's target replaced by its neighbour's; None if there is nothing to move."""
    moved = {k: batch[k].roll(1, 0) for k in targets if isinstance(batch.get(k), torch.Tensor) and batch[k].dim()}
    return {**batch, **moved} if moved else None
