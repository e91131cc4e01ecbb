"""Regression targets that the model's last layer cannot reach: below 0 after a sigmoid or ReLU, outside -1 to 1 after a tanh."""

import math

from torch import Tensor
from trainworthy.guard.measures.models.autograd import beyond

LAST = {
    "SigmoidBackward0": ("sigmoid", 0.0, 1.0),
    "HardsigmoidBackward0": ("hard sigmoid", 0.0, 1.0),
    "SoftmaxBackward0": ("softmax", 0.0, 1.0),
    "TanhBackward0": ("tanh", -1.0, 1.0),
    "ReluBackward0": ("ReLU", 0.0, math.inf),
    "SoftplusBackward0": ("softplus", 0.0, math.inf),
}
SHAPES = ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "UnsqueezeBackward0", "SqueezeBackward0", "SqueezeBackward1",
          "PermuteBackward0", "TransposeBackward0", "CloneBackward0", "ToCopyBackward0", "SelectBackward0", "SliceBackward0")  # fmt: skip
"""Operations that leave the values as they are."""
CALLS, FEWEST = 64, 3
SHARE = 0.2  # of the targets out of reach; augmented or padded ones may be a few


class OutputRanges:
    """Counts, for each last layer, the calls of regression losses and the share of their targets out of its range."""

    def __init__(self) -> None:
        self.shares: dict[str, list[float]] = {}  # by the name of the last operation

    def note(self, prediction: Tensor, target: Tensor) -> None:
        node = beyond(prediction.grad_fn, SHAPES)
        if node is None or node.name() not in LAST or not target.numel():
            return
        _, low, high = LAST[node.name()]
        shares = self.shares.setdefault(node.name(), [])
        if len(shares) < CALLS:
            off = 0.02 * (high - low if math.isfinite(high) else float(target.max() - target.min()))
            shares.append(float(((target < low - off) | (target > high + off)).float().mean()))

    def fault(self) -> tuple[str, str] | None:
        """Return what was measured and its cause if the targets of nearly all calls are out of reach."""
        for operation, shares in self.shares.items():
            if len(shares) < FEWEST or sorted(shares)[len(shares) // 10] <= SHARE:
                continue
            name, low, high = LAST[operation]
            measured = f"the model ends in a {name} ({low:g} to {high:g}), and {sum(shares) / len(shares):.0%} of its targets are outside"
            other = "the targets were normalised differently, or this last function should be left out"
            return measured, f"a {name} at the end of a model whose targets have another range: {other}"
        return None
