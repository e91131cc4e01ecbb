"""Finds token batches whose text runs across the samples: cut by view(-1, B) where view(B, -1) is meant.

The token after another one is then in the next sample, and not at the next place. Pairs of neighbours tell: those that follow each other in a
text depend on each other, those of two samples do not, but for what all samples have at one place (a template) or in common (copies).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

COMMON, GROUPS = 24, 25  # tokens that are told apart; groups of the others
PAIRS, MOST = 1500, 60_000  # pairs of neighbours that are needed, and read
TIMES, MORE = 2.0, 0.15  # information between samples against that between places: factor and difference in nats
COPIES = 0.3  # share of equal neighbours from which samples are copies of each other
CAUSE = (
    "each sample must hold a contiguous part of the text: ids.view(batch_size, -1), then .t() if time comes first; "
    "ids.view(-1, batch_size) puts the next token into the next sample"
)


def fault(texts: Sequence[Tensor]) -> tuple[str, str] | None:
    """Return what is wrong with tokens (B, T) that were given in this order, and its cause."""
    whole = [x for x in texts if x.dim() == 2 and min(x.shape) >= 4]
    if not whole:
        return None
    counts = torch.bincount(torch.cat([x.flatten() for x in whole]).clamp_min(0))
    code = COMMON + torch.arange(len(counts)) % GROUPS
    code[counts.topk(min(COMMON, len(counts))).indices] = torch.arange(min(COMMON, len(counts)))
    known = [code[x.clamp_min(0)] for x in whole]
    along = information([(x[:, :-1], x[:, 1:]) for x in known])
    across = information([(x[:-1], x[1:]) for x in known])
    far = information([(x[: len(x) // 2], x[-(len(x) // 2) :]) for x in known])
    equal = torch.cat([(x[:-1] == x[1:]).flatten() for x in known]).double().mean()
    if along is None or across is None or far is None or across - far < TIMES * along + MORE or equal > COPIES:
        return None
    return (
        f"a token and the one at the same position of the next sample share {across:.2f} nats, a token and the next one of its sample {along:.2f}",
        CAUSE,
    )


def information(pairs: list[tuple[Tensor, Tensor]]) -> float | None:
    """Return the mutual information of pairs in nats, without the bias of few of them (Miller and Madow 1955); None if there are too few."""
    a, b = (torch.cat([p[i].flatten() for p in pairs])[:MOST] for i in (0, 1))
    if len(a) < PAIRS:
        return None
    n = COMMON + GROUPS
    joint = torch.bincount(a * n + b, minlength=n * n).view(n, n).double()
    p = joint / joint.sum()
    own = p.sum(1, keepdim=True) * p.sum(0, keepdim=True)
    seen = p > 0
    found = (p[seen] * (p[seen] / own[seen]).log()).sum()
    free = seen.sum() - (p.sum(1) > 0).sum() - (p.sum(0) > 0).sum() + 1
    return float(found - free / (2 * len(a)))
