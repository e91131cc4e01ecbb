"""Models of sequences that score given candidates (SASRec): where the candidate of a place is the next item, no place may see later ones."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only
from trainworthy.core.base.modes import in_mode
from trainworthy.core.base.seeds import kept_draws
from trainworthy.guard.hooks.trees import floats
from trainworthy.guard.measures.losses.targets import fits
from trainworthy.guard.measures.records import bare

MOST = 16  # lookups of one call
CAUSE = "the model sees the item that it must predict: the causal mask is missing or turned around"
SEEN = 1e-4  # of the gradient by the places that may be seen; healthy models give exactly 0


class NextItems:
    """The first call of a model that looks up a sequence (B, T), and the same one item later, in one table."""

    def __init__(self) -> None:
        self.since: list[tuple[Tensor, int]] = []
        self.call: tuple[nn.Module, tuple, dict, Tensor, Tensor] | None = None  # ..., items, candidates

    def look(self, ids: Tensor, weight: Tensor) -> None:
        """Note ids (B, T) that are looked up."""
        if self.call is None and ids.dim() == 2 and min(ids.shape) > 3 and len(self.since) < MOST:
            self.since.append((ids.detach(), weight.data_ptr()))

    def root(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Note that a model's call is over."""
        looked, self.since = self.since, []
        for items, table in looked if self.call is None else ():
            for candidates, other in looked:
                if table == other and items.shape == candidates.shape and fits(items, candidates, 1, 0):
                    given = tree_map_only(Tensor, Tensor.detach, (args, kwargs))
                    self.call = (module, *copy.deepcopy(given), items.clone(), candidates.clone())
                    return


def check(seen: Any) -> list[tuple[str, str]]:
    """Return what was measured and its cause if a place sees the item that is its own candidate."""
    if seen.evidence.next_items.call is None:
        return []
    module, args, kwargs, items, candidates = seen.evidence.next_items.call
    half = items.shape[1] // 2
    try:
        with _rows(items, candidates) as rows, kept_draws(), in_mode(bare(module), training=False), torch.enable_grad():
            found = [y for y in floats(module(*args, **kwargs)) if y.shape == items.shape and y.requires_grad]
            total = sum((y[:, :half] * torch.randn_like(y[:, :half])).sum() for y in found)
            parts = [g.split(half, 1)[:2] for g in torch.autograd.grad(total, [rows[0], rows[1]])]
    except Exception:  # it cannot be called again, or the scores follow one of them alone
        return []
    (before, ahead), (own, others) = ([float(x.abs().max()) for x in part] for part in parts)
    if not before > 0 or not own > 0 or others > SEEN * own:  # not one candidate for each place
        return []
    measured = f"each candidate is the next item, and scores follow later items {ahead / before:.2g} times as much as earlier ones"
    return [(measured, CAUSE if ahead > SEEN * before else "")]


@contextmanager
def _rows(*ids: Tensor) -> Iterator[dict[int, Tensor]]:
    """Yield what is looked up for each of `ids`, by its place among them: leaves that require gradients."""
    original, found = F.embedding, {}

    def embedding(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = original(input, *args, **kwargs)
        at = next((k for k, x in enumerate(ids) if k not in found and torch.equal(x, input)), None)
        if at is None:
            return out
        found[at] = out.detach().requires_grad_(True)
        return found[at].clone()  # scripts scale it in place

    F.embedding = embedding
    try:
        yield found
    finally:
        F.embedding = original
