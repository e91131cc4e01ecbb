"""Finds overlap losses (Dice, Tversky, IoU) that get logits where they need probabilities.

Such a loss is called on the right answers twice: as probabilities 0 and 1, and as logits of -10 and 10. One with a sigmoid of its own likes
the logits better, one without it the probabilities.
"""

import re

import torch
from torch import Tensor, nn

NAMES = re.compile(r"dice|tversky|jaccard|iou", re.IGNORECASE)
CALLS, FEWEST = 6, 3
OUT = 0.05  # share of the input that is no probability
BETTER = 0.05


class Overlaps:
    """What the overlap losses of a script were given."""

    def __init__(self) -> None:
        # By class: for each call, the share of the inputs that are no probabilities, or -1 if the loss takes them.
        self.found: dict[str, list[float]] = {}

    def called(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Note one call of a module without parameters, in training."""
        rows = self.found.setdefault(type(module).__name__, [])
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if not NAMES.search(type(module).__name__) or len(rows) >= CALLS or len(given) != 2:
            return
        scores, target = given
        if not scores.requires_grad or target.requires_grad or scores.shape != target.shape or not target.numel():
            return
        right = target.detach().to(scores.dtype)
        if bool(((right != 0) & (right != 1)).any()) or not 0 < float(right.mean()) < 1:
            return
        share = float(((scores.detach() < 0) | (scores.detach() > 1)).float().mean())
        with torch.no_grad():
            probable, logits = (self._loss(module, args, kwargs, scores, x) for x in (right, 20 * right - 10))
        rows.append(share if share > OUT and probable < logits - BETTER else -1.0)

    @staticmethod
    def _loss(module: nn.Module, args: tuple, kwargs: dict, scores: Tensor, other: Tensor) -> float:
        """Return the loss of other scores."""
        given = [other if x is scores else x for x in args]
        return float(module.forward(*given, **{k: other if x is scores else x for k, x in kwargs.items()}))

    def fault(self) -> tuple[str, str] | None:
        """Return what was measured and its cause."""
        for name, rows in self.found.items():
            if len(rows) >= FEWEST and min(rows) > 0:
                return (
                    f"{name} gets values of which {sum(rows) / len(rows):.0%} are below 0 or above 1, and has no sigmoid of its own",
                    "an overlap is computed from probabilities: a sigmoid (or softmax) before the loss, or the option that applies it (sigmoid=True)",
                )
        return None
