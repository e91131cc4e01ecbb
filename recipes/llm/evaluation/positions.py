"""Perplexity by position in the context: what a longer context is worth, and where it breaks."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from trainworthy.core.base.doubles import to_double

from trainworthy import core

BINS = 16


def perplexity(scores: Callable[[dict], tuple[Tensor, Tensor, Tensor]], batches: Iterable[dict], context: int,
               gather: Callable[[Tensor], Tensor]) -> Tensor:  # fmt: skip
    """Return means over equal parts of a row of `context` tokens, (BINS,); NaN where no token is scored. `scores` of a batch: (negative
    log-likelihood in nats, log Z, scored mask) of each token after the first, (B, T - 1) each."""
    rows = []
    for batch in batches:
        (nll, _, scored), place = scores(batch), batch["position_ids"][:, 1:]
        part = (place * BINS // context).clamp_max(BINS - 1)
        sums = torch.zeros(2, len(nll), BINS, dtype=torch.float64)
        sums[0].scatter_add_(1, part.cpu(), to_double(nll * scored))
        sums[1].scatter_add_(1, part.cpu(), to_double(scored))
        rows.append(sums.transpose(0, 1).float())  # (B, 2, BINS)
    nats, tokens = to_double(gather(torch.cat(rows))).sum(0)
    return (nats / tokens).exp().cpu()


def figure(curves: dict[str, Tensor], context: int, learnt: int) -> core.Points:
    """Return the perplexity (BINS,) of each model by name; the first one is the reported model."""
    places, (first, *_) = (torch.arange(BINS) + 0.5) * context / BINS, curves.values()
    there = first.isfinite()  # the same bins for all: they score the same tokens
    note = f"Tokens by their place in what is read at once, {BINS} parts of {context / BINS:g}."
    note += f" Learnt before: up to {learnt}." if learnt else ""
    named = {name: curve[there] for name, curve in curves.items()} if len(curves) > 1 else {}
    return core.Points(places[there], first[there], axes=("position", "perplexity"), note=note, named=named)
