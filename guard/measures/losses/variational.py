"""Looks at the loss of a variational autoencoder through its gradients: is the KL term's variance bound, and does the
reconstruction count?

`backward()` gives the total gradient of mean and variance. What comes through the reconstruction is subtracted; what is left
is the gradient of the KL term, which theory gives.
"""

from itertools import permutations
from typing import Any

import torch
from torch import Tensor
from trainworthy.guard.hooks.trees import tensors

LOOKS, TRIES = 4, 64  # a weight that grows from 0 shows nothing at first
FORMS = {"log-variance": lambda s: (s / 2).exp() / 2, "log-deviation": torch.exp, "deviation": torch.ones_like,
         "variance": lambda s: s.rsqrt() / 2}  # fmt: skip
"""What the KL term takes the spread for, and the slope of the deviation by it."""
WIDER = 1.6  # times the deviation
OUTWEIGHED = 100  # times the weight that a likelihood summed over all entries gives the KL term
MEDIAN = 0.6745  # of the absolute values of normal noise


class Latent:
    """Gradients of the first losses by a model's outputs."""

    def __init__(self) -> None:
        self.outputs: list[Tensor] = []  # of the last model call with gradients
        self.looks = 0
        self.found: list[str] = []
        self.batch = 0

    def root(self, out: Any) -> None:
        """Keep the outputs if two of them may be mean and variance of a code."""
        leaves = [x for x in tensors(out) if x.requires_grad and x.dim() > 1]
        shapes = [tuple(x.shape) for x in leaves]
        self.outputs = leaves if 3 <= len(leaves) <= 5 and len(set(shapes)) < len(shapes) else []

    def look(self, loss: Tensor) -> None:
        """Compare the KL term's gradients with theory. Called before `backward()`."""
        outputs, self.outputs = self.outputs, []
        if not outputs or self.looks >= TRIES or len(self.found) >= LOOKS or loss.numel() != 1:
            return
        self.looks += 1
        total = torch.autograd.grad(loss, outputs, retain_graph=True, allow_unused=True)
        made = [makers(i, outputs) for i in range(len(outputs))]
        # A sample drawn from mean and variance is neither of them
        first = [i for i in range(len(outputs)) if not made[i]]
        for mean, spread in permutations(first, 2):
            if outputs[mean].shape != outputs[spread].shape or total[mean] is None or total[spread] is None:
                continue
            rest = [i for i in range(len(outputs)) if i not in (mean, spread) and total[i] is not None]
            pair = [outputs[mean], outputs[spread]]
            # the gradient of a returned sample contains that of the reconstruction made from it
            ways = [i for i in rest if not made[i] & set(rest)]
            through = torch.autograd.grad(
                [outputs[i] for i in ways], pair, [total[i] for i in ways], retain_graph=True, allow_unused=True
            ) if ways else (None, None)  # fmt: skip
            if through[0] is None or through[1] is None:
                continue
            with torch.no_grad():
                found = compare(*pair, total[mean] - through[0], total[spread] - through[1])
                weight = float((total[mean] - through[0]).flatten() @ pair[0].flatten()) / float(pair[0].pow(2).sum())
                recon = next((i for i in rest if outputs[i].shape != pair[0].shape), None)
                if found in FORMS and (other := unusual(*through, spread=outputs[spread], form=found)):
                    found = other
                elif found in FORMS and recon is not None and averaged(outputs[recon], total[recon], weight):
                    found = "averaged"
            if found:
                self.found.append(found)
                return


def averaged(made: Tensor, grad: Tensor, weight: float) -> bool:
    """Return whether the reconstruction is a mean over samples and entries, and the KL term's weight many times that of one entry. The data are
    what the gradient of a mean leads to, from logits, probabilities or values; they are between 0 and 1 only if it is a mean. `weight`: that
    of the KL term of one sample; the loss may be scaled so that it is 1 for a sample, or for the batch."""
    n, entries = len(made), made.numel()
    if entries < 1000 or weight <= 0:
        return False
    probable = made.min() >= 0 and made.max() <= 1
    slopes = [made.sigmoid() - grad * entries, made - grad * entries / 2] + [
        made - grad * made * (1 - made) * entries
    ] * bool(probable)
    starts = [made.sigmoid(), made] + [made] * bool(probable)
    for start, data in zip(starts, slopes, strict=True):
        for scale in (1.0, weight, weight * n):
            x = start + (data - start) / scale
            inside = bool(((x > -0.01) & (x < 1.01)).float().mean() > 0.99)
            if inside and weight / scale * entries > OUTWEIGHED and float((x - start).abs().mean()) > 0.01:
                return True
    return False


def makers(i: int, outputs: list[Tensor]) -> set[int]:
    """Return which of the other outputs an output was computed from."""
    others = [k for k in range(len(outputs)) if k != i]
    found = torch.autograd.grad(outputs[i].sum(), [outputs[k] for k in others], retain_graph=True, allow_unused=True)
    return {k for k, grad in zip(others, found, strict=True) if grad is not None}


def compare(mean: Tensor, spread: Tensor, by_mean: Tensor, by_spread: Tensor) -> str:
    """Return what the spread is (`FORMS`) where the gradients are those of a KL divergence from N(0, 1), `free` where the variance has none,
    `one-sided` where it is pushed one way whatever it is; empty where this is no KL divergence."""
    size = float(mean.pow(2).sum())
    weight = float((by_mean * mean).sum()) / max(size, 1e-30)
    if not weight or not float((by_mean - weight * mean).norm()) <= 1e-3 * float(by_mean.norm()):
        return ""
    unit = by_spread / weight
    if weight < 0:
        return "negative" if float((unit - (spread.exp() - 1) / 2).norm()) <= 0.01 * float(unit.norm()) else ""
    forms = [(spread.exp() - 1) / 2, (2 * spread).exp() - 1]
    if bool((spread > 0).all()):
        forms += [spread - 1 / spread, (1 - 1 / spread) / 2]
    for name, f in zip(FORMS, forms, strict=False):
        if float((unit - f).norm()) <= 0.01 * float(f.norm()) > 0:
            return name
    if float(unit.abs().max()) < 1e-3 and float(forms[0].abs().max()) > 1e-2:
        return "free"
    return "one-sided" if float((unit + 0.5).abs().max()) < 1e-3 else ""


def unusual(by_mean: Tensor, by_spread: Tensor, *, spread: Tensor, form: str) -> str:
    """Return `wider` if a code's noise is larger than the deviation, `one sign` if it has one; from the gradients of the reconstruction: a code
    mean + noise * deviation has those of the mean, times the noise and the deviation's slope. Several codes of one mean make it smaller."""
    noise = by_spread / (by_mean * FORMS[form](spread.detach()))
    noise = noise[noise.isfinite() & (noise != 0)]
    if noise.numel() < 128:
        return ""
    if float((noise > 0).float().mean()) > 0.98:
        return "one sign"
    return "wider" if float(noise.abs().median()) > WIDER * MEDIAN else ""


FAULTS = {
    "free": (
        "the KL term has no gradient for the variance",
        "exp() is missing at the log-variance, so it cancels: nothing keeps the variance from shrinking to 0",
    ),
    "one-sided": ("the KL term pushes the log-variance up, whatever it is", "the term exp(log-variance) is missing"),
    "negative": (
        "the KL term has the wrong sign: its gradient drives means away from 0 and variances away from 1",
        "it is -0.5 * sum(1 + log-variance - mean**2 - exp(log-variance)), and is added to the loss",
    ),
    "wider": (
        "codes are drawn with a larger deviation than the one whose KL term is in the loss",
        "exp(log-variance) is used as the deviation: exp(0.5 * log-variance) is meant",
    ),
    "one sign": (
        "the noise of the codes is never negative",
        "it is uniform (torch.rand, rand_like) where normal noise is meant (torch.randn, randn_like)",
    ),
    "averaged": (
        "the reconstruction is a mean over samples and pixels, and the KL term a sum over codes",
        "reduction='sum' is missing at the reconstruction (divided by the batch size where the KL term is): the KL term outweighs it and the "
        "code becomes empty",
    ),
}


def check(one: Latent) -> tuple[tuple[str, str] | None, str]:
    """Return what is wrong with the KL term, and what was found."""
    if len(one.found) < 2 or len(set(one.found)) > 1:
        return None, ""
    fault = FAULTS.get(one.found[0])
    return fault, "" if fault else "the KL term's gradients are those of theory"
