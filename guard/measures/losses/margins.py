"""Heads that are given the label to make its class harder (ArcFace, CosFace): the score of a class must not rise because it is the label."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten
from trainworthy.core.base.modes import in_mode
from trainworthy.core.base.seeds import kept_draws
from trainworthy.core.base.verdict import Fault
from trainworthy.guard.hooks.trees import floats
from trainworthy.guard.measures.records import bare

ROWS, SHARE = 8, 0.9
SEEN = 1e-4  # of the spread of the scores


def check(seen: Any) -> tuple[Fault | None, str]:
    """Call each model again that gets class numbers (N,) and whose scores (N, C) a class loss compares with them: with other class numbers
    the scores of the classes before must be higher."""
    heads = {r.get("root") for r in seen.calls} if seen.control is not None else ()
    for module, args, kwargs in (row for at, row in seen.several.items() if at in heads):
        leaves, spec = tree_flatten((args, kwargs))
        at = next(
            (i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.dim() == 1 and x.dtype == torch.int64), None
        )
        if at is None or len(leaves[at]) < ROWS:
            continue
        labels = leaves[at].detach()
        others = labels.roll(1)
        scores = []
        try:
            for given in (labels, others):
                leaves[at] = given
                again = tree_unflatten(leaves, spec)
                with kept_draws(), in_mode(bare(module), training=False), torch.no_grad():
                    torch.manual_seed(0)
                    scores.append(
                        next(y for y in floats(module(*again[0], **again[1])) if y.dim() == 2 and len(y) == len(labels))
                    )
        except Exception:
            continue
        rows = (labels != others).nonzero().flatten()
        if len(rows) < ROWS or scores[0].shape != scores[1].shape or scores[0].shape[1] <= int(labels.max()):
            continue
        change = (scores[0] - scores[1])[rows, labels[rows]] / scores[0].float().std().clamp_min(1e-12)
        up, down = (float((sign * change > SEEN).float().mean()) for sign in (1, -1))
        measured = f"the score of a class is {'higher' if up > down else 'lower'} in {max(up, down):.0%} of the rows where it is the label"
        if up >= SHARE:
            cause = "the margin makes the other classes harder, and the right one easier: sides of the one-hot labels are exchanged, or its sign"
            return (measured, cause), measured
        if down >= SHARE:
            return None, measured
    return None, ""
